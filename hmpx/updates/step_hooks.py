"""Wraps the step function of every optimizer class: outside of the class's own code, inside of the user's step hooks.

torch wraps `step` of every optimizer class once (`Optimizer.profile_hook_step`). The wrapper runs the user's pre-hooks,
the class's own function and the user's post-hooks. Its closure holds the own function, which hmpx replaces there.
Two other places would not do:

- global step hooks do not run when a step raises. They also run outside the user's own hooks, which would then see
  shadows instead of parameters, or parameters that are not written back yet;
- a patch on the class does not reach LR schedulers that exist already: each keeps the bound `step` that it found.

A step that torch has not wrapped is wrapped on its class: `functools.wraps` copies the mark by which torch tells that
it has, and whoever replaces a step later is not seen by torch.

The first conversion, `disable_casts` region or attachment installs the wrappers. They stay until `hmpx.restore()`, or
the end of a conversion, finds that nobody needs them: then torch gets everything back exactly. As long as they stay,
other functions of torch are wrapped too, by `optimizer_hooks`, `released` and others (`_watch`).
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from hmpx.base import process_state, region_state, run_in_region
from hmpx.base.changes import Attribute, Cell, Changes
from hmpx.base.compiling import never_compile
from hmpx.base.process_state import first_steps, open_caches
from hmpx.base.raw import with_subclasses
from hmpx.base.torch_private import has
from hmpx.errors import HmpxError
from hmpx.updates import around_steps, gradients, optimizer_hooks, ranks
from hmpx.updates.holding import state_dtypes
from hmpx.updates.holding.stores import Settings
from hmpx.updates.optimizer_hooks import takes_hooks
from hmpx.updates.ranks import replicas
from hmpx.updates.stepping import released, step_count
from hmpx.updates.stepping.names import ATTRIBUTE, has_bf16, inside_zero, own_attachment, parameters, share_names
from hmpx.updates.stepping.optimizer_classes import HOOK, cell_of, is_watched, own_step
from hmpx.updates.stepping.step import WeightUpdates
from hmpx.updates.stepping.step_call import StepCall

Optimizer = torch.optim.Optimizer
logger = logging.getLogger("hmpx")

_lock = process_state.new_lock()
_is_installed = False
_attached: WeakSet[Optimizer] = WeakSet()
_changes = Changes()  # of torch.optim.Optimizer, while this is installed
_SETTINGS = Settings()  # for steps in regions
_in_regions: WeakKeyDictionary[Optimizer, WeightUpdates] = WeakKeyDictionary()  # optimizers that nobody attached
_compared: WeakKeyDictionary[Optimizer, StepCounts | None] = WeakKeyDictionary()  # those that step on several ranks
_refusing: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # handles of the hooks by `refuse_plain_steps`
_warned: WeakSet[Optimizer] = WeakSet()  # those that were warned of round-to-nearest


def install(*attached: Optimizer) -> None:
    """Install hmpx in every optimizer step, unless it is there; `attached` needs it there from here on."""
    global _is_installed
    with _lock:
        _attached.update(attached)
        if not _is_installed:
            try:
                _watch()
                _is_installed = True
            except BaseException:
                _changes.close()
                raise
        for optimizer in attached:
            _watch_class(type(optimizer))


def uninstall() -> None:
    """Leave torch as it was, unless a conversion, an open region or an attached optimizer needs hmpx in its steps."""
    global _is_installed
    with _lock:
        if not (_attached or open_caches or process_state.installed or process_state.off.by):
            _is_installed = False
            _changes.close()


def detached(optimizer: Optimizer) -> None:
    """Note that this optimizer is no longer attached."""
    _attached.discard(optimizer)


def _watch() -> None:
    for cls in with_subclasses(Optimizer):
        if getattr(vars(cls).get("step"), "hooked", False):
            _watch_class(cls)
    for cls, cell in _cells():
        _changes.put(Cell(cell, f"{cls.__name__}.step"), _watched(cell.cell_contents))
    _changes.callback(_warned.clear)  # a new conversion warns again
    _changes.callback(first_steps.clear)
    for name, wrapper in _MAKERS:
        optimizer_hooks.wrap(_changes, name, wrapper)
    optimizer_hooks.install(_changes, lambda: _is_installed, refuse_steps_on_loaded)
    around_steps.watch(_changes)
    released.watch(_changes, _watch_again)
    ranks.watch_joins(_changes, gradients.settings_of)


def step_part(optimizer: Optimizer, updates: WeightUpdates, params: list[torch.nn.Parameter]) -> None:
    """Step some parameters of an attached optimizer, outside of the optimizer's `step`."""
    call = StepCall(optimizer, own_step(type(optimizer)))
    run_in_region.run_step(optimizer, None, updates.step_part, (call, params))


def _cells() -> Iterator[tuple[type, types.CellType]]:
    """Yield every optimizer class that torch has wrapped, and the closure cell that holds its own step function."""
    for cls in with_subclasses(Optimizer):
        cell = cell_of(vars(cls).get("step"))
        if cell is not None:
            yield cls, cell


def _watch_class(cls: type[Optimizer]) -> None:
    """Wrap the step of a class, unless torch has: then hmpx is inside of torch's wrapper."""
    if cell_of(cls.step) is None and not is_watched(cls.step):
        owner = next(base for base in cls.__mro__ if "step" in vars(base))
        _changes.put(Attribute(owner, "step", f"{owner.__name__}.step"), _watched(cls.step))


def _watch_again(optimizer: Optimizer) -> None:
    """In `zero_grad`, see to it that the next step is watched: somebody may have replaced it since."""
    attachment = own_attachment(optimizer)
    if _is_installed and attachment is not None and optimizer is attachment.optimizer:
        with _lock:
            _watch_class(type(optimizer))
            attachment.watch_step()


def _watched(step: Callable) -> Callable:
    @functools.wraps(step)
    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # A class may hold this function after hmpx was uninstalled, and a subclass may call its parent's step.
        if not _is_installed or region_state.owned_by(optimizer) is not None:
            return step(optimizer, *args, **kwargs)
        for tell in list(first_steps):
            tell()
        attachment = vars(optimizer).get(ATTRIBUTE)
        if attachment is None and not (args or kwargs or open_caches) and _is_plain(optimizer):
            return run_in_region.run_plain_step(optimizer, step)
        around = region_state.innermost()
        how = around.rounding
        call = StepCall(optimizer, step, args, kwargs, how.seed if how else None)
        if args or kwargs:
            # A closure runs the model's forward, so it casts as outside of the step, and of a disable_casts region.
            casting = around.casting if how is None else None
            call = call.with_functions(functools.partial(_cast_inside, casting))
        own = _step if attachment is None else attachment.step
        forget = functools.partial(_forget_casts, optimizer)
        return run_in_region.giving_back(forget, run_in_region.run_step, optimizer, how, own, (call,))

    vars(watched)["__hmpx_original__"] = step
    return never_compile(watched)


def _is_plain(optimizer: Optimizer) -> bool:
    """Return whether hmpx has nothing to do with the weights and the state of an optimizer that is not attached."""
    is_ours = has_bf16(optimizer) or inside_zero(optimizer) is not None
    return not is_ours and not step_count.stored(optimizer)


def _step(call: StepCall) -> Any:
    """Step an optimizer that is not attached: as the region around the step says, or plainly if it says nothing."""
    optimizer, how = call.optimizer, region_state.innermost().rounding
    inner = inside_zero(optimizer)
    if inner is not None:  # its step is watched as well, and does the rest
        share_names(optimizer, inner)
        return call.run()
    if how is not None and has_bf16(optimizer):
        refuse_plain_steps(optimizer)
        updates = _in_regions.get(optimizer) or _in_regions.setdefault(optimizer, WeightUpdates(_SETTINGS))
        _compare_in_region(optimizer, updates, call.seed)
        return updates.step(call)
    if how is not None and step_count.stored(optimizer):  # its parameters were BF16 in earlier steps
        step_count.keep(optimizer)
    refuse_codes(optimizer)
    warn_of_nearest(optimizer)
    return call.run()


class StepCounts:
    """Comparisons of the step number and the seed of one optimizer over its ranks.

    Args:
        group: the process group of the ranks that hold it; None for all.
        since: from when on its steps are counted.
    """

    def __init__(self, group: Any, since: str = "hmpx.attach") -> None:
        self._group, self._since, self._steps = group, since, 0

    def compare(self, optimizer: Optimizer, updates: Any, seed: int | None = None) -> None:
        """Compare before steps 1, 2, 4, 8 and so on; `seed` is that of the region around it.

        A rank that drifts between two of them is found at the next.

        Raises:
            HmpxError: seed or step number are not those of the first rank.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) or not ranks.several_ranks():  # no power of two
            return
        key = updates.rounding_key(optimizer, seed)
        what = f"step {self._steps} of {type(optimizer).__name__} since {self._since}"
        ranks.compare(what, {"seed": key.seed, "step": key.step}, self._group)


def _compare_in_region(optimizer: Optimizer, updates: Any, seed: int | None) -> None:
    """Before a step in a region, compare seed and step number over the ranks of a DistributedDataParallel module."""
    if ranks.several_ranks():
        if optimizer not in _compared:
            reduced = replicas()
            module = next((reduced[p] for p in parameters(optimizer) if p in reduced), None)
            counts = None if module is None else StepCounts(module.process_group, "its first in a region")
            _compared[optimizer] = counts
        counts = _compared[optimizer]
        if counts is not None:
            counts.compare(optimizer, updates, seed)


def _forget_casts(optimizer: Optimizer) -> None:
    """Drop the cached casts of the weights that this optimizer steps."""
    if open_caches:
        stepped = {id(p) for p in parameters(optimizer)}
        for cache in list(open_caches.values()):
            cache.forget(stepped)


def _cast_inside(casting: bool | None, closure: Callable) -> Callable:
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        region = region_state.Region(
            casting, region_state.innermost().rounding, casting is not False, region_state.scope()
        )
        return run_in_region.run_in(region, closure, args, kwargs)

    return evaluate


def _hooking(profile_hook_step: Callable) -> Callable:
    """Wrap the decorator that torch puts on a class's step when the class makes its first optimizer."""

    def hook(step: Callable) -> Callable:
        hooked = profile_hook_step(step)
        _watch_new(hooked)
        return hooked

    return hook


def _making(make: Callable) -> Callable:
    """Wrap `__init__` or `__setstate__` of optimizers, in a torch that has no such decorator."""

    @functools.wraps(make)
    def making(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _watch_new(type(self).step)

    return making


def _watch_new(hooked: Callable) -> None:
    with _lock:
        cell = cell_of(hooked)
        if cell is not None and _is_installed and not is_watched(cell.cell_contents):
            _changes.put(Cell(cell, hooked.__qualname__), _watched(cell.cell_contents))


_MAKERS = [("profile_hook_step", _hooking)] if has(HOOK) else [("__init__", _making), ("__setstate__", _making)]


# Plain steps of BF16 parameters are refused if their state is FP32 from regions or in codes, else warned of once.


def refuse_plain_steps(optimizer: Optimizer) -> None:
    """Refuse plain steps, and keep the step number in checkpoints: after a step in a region, or a load of codes.

    Hooks on the optimizer do this, since hmpx may be uninstalled when the plain step comes.
    """
    if optimizer not in _refusing and takes_hooks(optimizer):
        _refusing[optimizer] = [optimizer.register_step_pre_hook(_refuse)]
        if takes_hooks(optimizer, "register_state_dict_pre_hook"):  # classes that wrap another may lack it
            _refusing[optimizer].append(optimizer.register_state_dict_pre_hook(_carry_number))


def _carry_number(optimizer: Optimizer) -> None:
    """Store step number and seed again: since the last step, the user may have removed the group that had them."""
    if own_attachment(optimizer) is None and step_count.stored(optimizer):
        step_count.keep(optimizer)


def _refuse(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    is_plain = region_state.innermost().rounding is None and own_attachment(optimizer) is None
    if is_plain:
        refuse_codes(optimizer)
    if is_plain and state_dtypes.has_fp32_state(optimizer):
        raise HmpxError(
            f"{type(optimizer).__name__} has stepped in hmpx.disable_casts(), or has loaded the state of such a step, "
            "so its state is FP32, which a plain step on BF16 parameters cannot go on with. Write "
            "`with hmpx.disable_casts(): optimizer.step()` for every step, "
            "or hmpx.attach(optimizer) once; hmpx.detach(optimizer) brings the state to BF16 for plain steps"
        )


def refuse_steps_on_loaded(optimizer: Optimizer) -> None:
    """Refuse plain steps after a load that has brought state in codes, or the FP32 state of steps by hmpx."""
    is_wide = step_count.stored(optimizer) and state_dtypes.has_fp32_state(optimizer)
    if is_wide or state_dtypes.code_in(optimizer) is not None:
        refuse_plain_steps(optimizer)


def refuse_codes(optimizer: Optimizer) -> None:
    """Refuse a plain step on state in codes. An optimizer that calls ``state.get``, as SGD does, would begin anew.

    Raises:
        HmpxError: there is state in codes.
    """
    code = state_dtypes.code_in(optimizer) if step_count.stored(optimizer) else None
    if code is not None:
        raise HmpxError(
            f"{type(optimizer).__name__} has state in {code.bits} bits, from a checkpoint of an optimizer with "
            f'state_dtype="{code.name}", which a plain step cannot read: hmpx.attach(optimizer) takes it over, '
            "hmpx.detach(optimizer) brings it to the dtype of the parameters"
        )


def allow_plain_steps(optimizer: Optimizer) -> bool:
    """Remove the hooks of `refuse_plain_steps`; return whether there were any."""
    handles = _refusing.pop(optimizer, ())
    for handle in handles:
        handle.remove()
    return bool(handles)


def warn_of_nearest(optimizer: Optimizer) -> None:
    """Warn of a plain step of BF16 parameters, once for each optimizer."""
    rounds_itself = getattr(optimizer, "bf16_stochastic_round", False)  # torchao's optimizers have this attribute
    if optimizer not in _warned and has_bf16(optimizer) and not rounds_itself:
        _warned.add(optimizer)
        logger.warning(
            "hmpx: %s updates BF16 parameters with round-to-nearest, which drops small updates; "
            "write `with hmpx.disable_casts(): optimizer.step()` for stochastic rounding",
            type(optimizer).__name__,
        )
