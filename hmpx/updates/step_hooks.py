"""Where hmpx stands in an optimizer step: around the optimizer's own function, inside its hooks.

torch wraps `step` of every optimizer class once (`Optimizer.profile_hook_step`): user pre-hooks, the class's own
function, user post-hooks. hmpx exchanges that inner function, held by the wrapper's closure, because the places beside
it do not serve:

- global step hooks do not run when a step raises, and run outside the user's own hooks, which would then see shadows
  instead of parameters, or parameters that are not written back yet;
- a patch on the class is passed by: every LR scheduler keeps the bound `step` that it found.

Installed as long as a conversion, a `disable_casts` region or an attached optimizer needs it, then put back exactly.
Meanwhile `load_state_dict` keeps the FP32 state that such steps made, `add_param_group` and `swap_tensors` tell the
attachment, and `released` answers who asks for gradients that are gone.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hmpx import region_state
from hmpx.casts import dynamo, weight_cache
from hmpx.changes import Attribute, Cell, Changes
from hmpx.errors import HmpxError
from hmpx.updates import optimizer_state, step_count
from hmpx.updates.gradients import claims, released
from hmpx.updates.names import parameters
from hmpx.updates.ranks import zero
from hmpx.updates.settings import Settings
from hmpx.updates.step import WeightUpdates, has_bf16
from hmpx.updates.step_count import STEP_KEY
from hmpx.updates.whole_step import replace_closure

Optimizer = torch.optim.Optimizer
logger = logging.getLogger("hmpx")

_lock = threading.RLock()
_users = 0
_changes = Changes()  # of torch.optim.Optimizer, while there is a user
_HOOKED = Optimizer.profile_hook_step(lambda optimizer: None).__code__  # of torch's wrapper around every step
ATTRIBUTE = "_hmpx_attachment"  # of an attached optimizer
_refusing: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()  # that have stepped in a region: their hook
_collected: deque[None] = deque()  # one for each attached optimizer that nobody holds any more
_running = threading.local()  # optimizers whose step is running in this thread, and the one that loads
_warned = _for_graphs = False
_in_region = WeightUpdates(Settings())  # for optimizers that nobody attached


def install() -> None:
    """Watch every optimizer step from here on. Calls nest."""
    global _users
    with _lock:
        uninstall_collected()
        _users += 1
        if _users == 1:
            _watch()


def uninstall() -> None:
    """Take back one `install`; the last one leaves torch as it was."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _changes.close()


def _watch() -> None:
    for cls, cell in _cells():
        _changes.put(Cell(cell, f"{cls.__name__}.step"), _watched(cell.cell_contents))
    for name, around in (
        ("profile_hook_step", _hooking),
        ("_process_value_according_to_param_policy", _loading),
        ("add_param_group", _adding),
        ("load_state_dict", _load_into),
    ):
        there = vars(Optimizer)[name]
        watching = around(getattr(Optimizer, name))
        ours = staticmethod(watching) if isinstance(there, staticmethod) else watching
        _changes.put(Attribute(Optimizer, name, f"torch.optim.Optimizer.{name}"), ours)
    swap = Attribute(torch.utils, "swap_tensors", "torch.utils.swap_tensors")
    _changes.put(swap, _swapping(torch.utils.swap_tensors))
    released.watch(_changes)


def install_for_graphs(_: Any = None) -> None:
    """Watch from here on: a compiled function has a region in it, which installs nothing when it runs."""
    global _for_graphs
    if not _for_graphs:
        _for_graphs = True
        install()


def uninstall_for_graphs() -> None:
    """Take that back, when compiled functions are compiled anew."""
    global _for_graphs
    if _for_graphs:
        _for_graphs = False
        uninstall()


def uninstall_later() -> None:
    """`uninstall` from the garbage collector, which may come while one of the above is at work."""
    _collected.append(None)


def uninstall_collected() -> None:
    """Do what `uninstall_later` put off."""
    while _collected:
        _collected.pop()
        uninstall()


def step_alone(optimizer: Optimizer, updates: WeightUpdates, p: torch.nn.Parameter) -> None:
    """Step one parameter of an attached optimizer, outside of the optimizer's `step`."""
    own = _cell(type(optimizer).step).cell_contents
    with region_state.region(casting=False), torch.no_grad():
        updates.step_alone(optimizer, getattr(own, "__hmpx_original__", own), p)


def _cells() -> Iterator[tuple[type, types.CellType]]:
    """Every optimizer class that torch has wrapped, and the closure cell that holds its own step function."""
    classes = [Optimizer]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        cell = _cell(vars(cls).get("step"))
        if cell is not None:
            yield cls, cell


def _cell(step: Any) -> types.CellType | None:
    """That of one class. Dynamo puts a wrapper around torch's in some classes, LBFGS for one."""
    while step is not None and getattr(step, "__code__", None) is not _HOOKED:
        step = getattr(step, "__wrapped__", None)
    return None if step is None else step.__closure__[_HOOKED.co_freevars.index("func")]


def _watched(step: Callable) -> Callable:
    @functools.wraps(step)
    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        running = _running.__dict__.setdefault("optimizers", set())
        # A subclass that calls its parent's step, or one that holds this function still.
        if id(optimizer) in running or not _users:
            return step(optimizer, *args, **kwargs)
        how, attached = region_state.rounding(), vars(optimizer).get(ATTRIBUTE)
        # A closure is the model's forward: cast as outside of the step, and in a disable_casts region cast as well.
        args, kwargs = replace_closure(
            args, kwargs, functools.partial(_cast_inside, region_state.casting() if how is None else True)
        )
        running.add(id(optimizer))
        try:
            with region_state.region(casting=False, how=how):
                if zero.inner(optimizer) is not None:  # whose own step is watched as well
                    return step(optimizer, *args, **kwargs)
                if attached is not None:
                    return attached.step(optimizer, step, args, kwargs, how.seed if how else None)
                if how is not None and has_bf16(optimizer):
                    _refuse_plain_steps(optimizer)
                    return _in_region.step(optimizer, step, args, kwargs, how.seed)
                if how is not None and step_count.stored(optimizer):  # from steps of parameters that are BF16 no more
                    step_count.keep(optimizer)
                _warn_of_nearest(optimizer)
                return step(optimizer, *args, **kwargs)
        finally:
            running.discard(id(optimizer))
            if weight_cache.open_caches:
                weight_cache.forget(parameters(optimizer))

    watched.__hmpx_original__ = step
    watched._torchdynamo_disable = True
    return watched


dynamo.never_compile(_watched(lambda optimizer: None))  # one code serves every class


def _refuse_plain_steps(optimizer: Optimizer) -> None:
    """A step in a region is made. Outside of any, nothing of hmpx stands in the way of a plain one but this hook."""
    if optimizer not in _refusing and hasattr(optimizer, "_optimizer_step_pre_hooks"):
        _refusing[optimizer] = optimizer.register_step_pre_hook(_refuse_plain)


def _refuse_plain(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    if (
        region_state.rounding() is None
        and ATTRIBUTE not in vars(optimizer)
        and optimizer_state.has_fp32_state(optimizer)
    ):
        raise HmpxError(
            f"{type(optimizer).__name__} has stepped in hmpx.disable_casts(), so its state is FP32, which a plain step "
            "on BF16 parameters cannot go on with. Write `with hmpx.disable_casts(): optimizer.step()` for every step, "
            "or hmpx.attach(optimizer) once; hmpx.detach(optimizer) brings the state to BF16 for plain steps"
        )


def allow_plain_steps(optimizer: Optimizer) -> bool:
    """Take that back; whether there was something to take back."""
    handle = _refusing.pop(optimizer, None)
    if handle is not None:
        handle.remove()
    return handle is not None


def _cast_inside(casting: bool | None, closure: Callable) -> Callable:
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with region_state.region(casting, region_state.rounding()):
            return closure(*args, **kwargs)

    return evaluate


def _hooking(profile_hook_step: Callable) -> Callable:
    """What torch wraps the step of a class by, when the first optimizer of the class is made."""

    def hook(step: Callable) -> Callable:
        hooked = profile_hook_step(step)
        cell = _cell(hooked)
        with _lock:
            if cell is not None and _users:
                _changes.put(Cell(cell, step.__qualname__), _watched(step))
        return hooked

    return hook


def _adding(add_param_group: Callable) -> Callable:
    @functools.wraps(add_param_group)
    def add(optimizer: Optimizer, param_group: dict) -> None:
        add_param_group(optimizer, param_group)
        attached = vars(optimizer).get(ATTRIBUTE)
        if attached is not None:
            attached.sync_parameters()

    return add


def _load_into(load_state_dict: Callable) -> Callable:
    @functools.wraps(load_state_dict)
    def load(self: Optimizer, state_dict: dict) -> None:  # torch.distributed.checkpoint gives `self` by its name
        attached, before = vars(self).get(ATTRIBUTE), getattr(_running, "loads_fp32", False)
        _running.loads_fp32 = attached is not None
        try:
            if attached is not None:
                attached.load_last(self)
            load_state_dict(self, state_dict)
        finally:
            _running.loads_fp32 = before
        step_count.forget(self)

    return load


def _swapping(swap_tensors: Callable) -> Callable:
    @functools.wraps(swap_tensors)
    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        swap_tensors(t1, t2)
        claims.swapped(t1, t2)

    return swap


def _loading(process_value: Callable) -> Callable:
    """What `load_state_dict` makes of a state tensor: torch casts it to the parameter's dtype, a resume needs FP32."""

    def process(
        param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list, key: Any = None
    ) -> torch.Tensor:
        kept = param.dtype is torch.bfloat16 and value.dtype is torch.float32 and key != "step" and _users
        ours = getattr(_running, "loads_fp32", False) or region_state.rounding() is not None
        ours = ours or any(STEP_KEY in group for group in param_groups)
        if kept and ours:
            return value.to(device=param.device)
        return process_value(param, value, param_id, param_groups, key)

    return process


def _warn_of_nearest(optimizer: Optimizer) -> None:
    global _warned
    if not _warned and has_bf16(optimizer):
        _warned = True
        logger.warning(
            "hmpx: %s updates BF16 parameters with round-to-nearest, which drops small updates; "
            "write `with hmpx.disable_casts(): optimizer.step()` for stochastic rounding",
            type(optimizer).__name__,
        )
