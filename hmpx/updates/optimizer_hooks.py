"""Functions of torch around optimizers, other than `step`, that hmpx must know of or change; methods that it replaces.

- A load keeps the FP32 state of BF16 parameters, which torch would cast down.
- An attachment hears of loads, of new parameter groups, of parameters whose contents `torch.utils.swap_tensors`
  exchanges, and of new DistributedDataParallel modules.
- The step that torch.distributed.checkpoint takes to make an optimizer create its state does not count, and may give
  BF16 gradients to parameters whose gradients are FP32.
- Copies and pickles of an attached optimizer are attached in the same way. The class of an attachment comes from the
  attachment itself, which imports this file.
- A training loop calls `first_step` and `second_step` of sharpness-aware minimisation, and schedule-free optimizers
  move between two points in `train` and `eval`. Each such call is a step with a write-back of its own. Other methods
  that rewrite weights are named by ``attach(methods=...)``.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from hmpx.base import region_state, run_in_region
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import when_imported
from hmpx.base.torch_private import LOADS, TRIAL_STEPS
from hmpx.errors import HmpxError, did_you_mean
from hmpx.rounding.state_codes import code_of
from hmpx.updates import gradients
from hmpx.updates.holding.state_dtypes import find_again, weight_keys
from hmpx.updates.holding.stores import Stores
from hmpx.updates.ranks import watch_wrapping
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import ATTRIBUTE, has_bf16, own_attachment, parameters
from hmpx.updates.stepping.optimizer_classes import replaced_step
from hmpx.updates.stepping.step_call import StepCall
from hmpx.updates.stepping.step_count import STEP_KEY

Optimizer = torch.optim.Optimizer

_MODULE = "torch.distributed.checkpoint.state_dict"
_NOT_LOADED = "nothing was loaded. Without the key, the load starts from 0"
_WIDENED = (
    "hmpx: %s: %r was given as a BF16 tensor, in which small changes are lost: the optimizer holds a copy in FP32. Who "
    "changes it writes to the one in param_groups; the given tensor is no longer read"
)
logger = logging.getLogger("hmpx")
_loading = threading.local()  # attached: whether the optimizer that loads in this thread is attached


def install(changes: Changes, is_installed: Callable[[], object], loaded: Callable[[Optimizer], None]) -> None:
    """Wrap these functions until `changes` are undone.

    is_installed: whether they are still wrapped. loaded: is told of optimizers that have loaded and are not attached.
    """
    if LOADS.is_on():
        wrap(changes, "_process_value_according_to_param_policy", functools.partial(_keeping_fp32, is_installed))
    wrap(changes, "add_param_group", _telling_of_groups)
    wrap(changes, "load_state_dict", functools.partial(_telling_of_loads, loaded))
    swap = Attribute(torch.utils, "swap_tensors", "torch.utils.swap_tensors")
    changes.put(swap, _telling_of_swaps(torch.utils.swap_tensors))
    watch_wrapping(changes, gradients.wrapped)
    _watch_trial_steps(changes)


def wrap(changes: Changes, name: str, wrapper: Callable[[Callable], Callable]) -> None:
    """Replace a method of `torch.optim.Optimizer` by ``wrapper(method)``, until `changes` are undone."""
    ours = wrapper(getattr(Optimizer, name))
    is_static = isinstance(vars(Optimizer)[name], staticmethod)
    attribute = Attribute(Optimizer, name, f"torch.optim.Optimizer.{name}")
    changes.put(attribute, staticmethod(ours) if is_static else ours)


def takes_hooks(optimizer: Optimizer, register: str = "register_step_pre_hook") -> bool:
    """Return whether an optimizer takes hooks: one that wraps another may never have run `Optimizer.__init__`."""
    try:
        getattr(optimizer, register)(lambda *_: None).remove()
    except AttributeError:
        return False
    return True


def _keeping_fp32(is_installed: Callable[[], object], process_value: Callable) -> Callable:
    """Keep FP32 state in `load_state_dict`, which would cast it to the parameter's dtype and make a resume inexact.

    Codes of state are no numbers, and are never cast.
    """

    def process(
        param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list, key: Any = None
    ) -> torch.Tensor:
        if value.dtype is torch.uint8 and code_of(key) is not None and is_installed():
            return value.to(device=param.device)
        is_fp32_state = param.dtype is torch.bfloat16 and value.dtype is torch.float32 and key != "step"
        if is_fp32_state and is_installed():
            is_ours = getattr(_loading, "attached", False) or region_state.innermost().rounding is not None
            if is_ours or any(STEP_KEY in group for group in param_groups):
                return value.to(device=param.device)
        return process_value(param, value, param_id, param_groups, key)

    return process


def _telling_of_groups(add_param_group: Callable) -> Callable:
    @functools.wraps(add_param_group)
    def add(optimizer: Optimizer, param_group: dict) -> None:
        widen_hyperparameters(optimizer, param_group)
        add_param_group(optimizer, param_group)
        attachment = own_attachment(optimizer)
        if attachment is not None:
            attachment.sync_parameters()

    return add


def widen_hyperparameters(optimizer: Optimizer, *groups: dict[str, Any]) -> None:
    """Keep a tensor learning rate in FP32, and say so: in BF16, a scheduler's factor of .999 would do nothing."""
    found = set()
    for values in (optimizer.defaults, *groups):
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 and not value.dim():
                values[key] = value.float()
                found.add(key)
    for key in sorted(found):
        logger.warning(_WIDENED, type(optimizer).__name__, key)


def _telling_of_loads(loaded: Callable[[Optimizer], None], load_state_dict: Callable) -> Callable:
    @functools.wraps(load_state_dict)
    def load(self: Optimizer, state_dict: dict) -> None:  # torch.distributed.checkpoint gives `self` by its name
        step_count.check(state_dict.get("param_groups", ()), "the checkpoint's", _NOT_LOADED)
        attachment, before = own_attachment(self), getattr(_loading, "attached", False)
        _loading.attached = attachment is not None
        try:
            if attachment is not None:
                attachment.before_load(self)
            load_state_dict(self, state_dict)
        finally:
            _loading.attached = before
        step_count.forget(self)
        if attachment is None:
            loaded(self)
        else:
            attachment.after_load(self)

    return load


def _telling_of_swaps(swap_tensors: Callable) -> Callable:
    @functools.wraps(swap_tensors)
    def swap(t1: torch.Tensor, t2: torch.Tensor) -> None:
        swap_tensors(t1, t2)
        step_count.swapped(t1, t2)
        gradients.swapped(t1, t2)

    return swap


def _watch_trial_steps(changes: Changes) -> None:
    """Wrap torch.distributed.checkpoint's step as soon as its module is imported, until `changes` are undone."""

    def patch(module: ModuleType) -> None:
        if not TRIAL_STEPS.is_on():
            return
        attribute = Attribute(module, "_init_optim_state", f"{_MODULE}._init_optim_state")
        changes.put(attribute, _as_trial(module._init_optim_state))

    when_imported(_MODULE, patch, changes)


def _as_trial(init: Callable) -> Callable:
    @functools.wraps(init)
    def init_optim_state(optim: torch.optim.Optimizer) -> None:
        found = [p for p in parameters(optim) if p.grad is None and p.dtype is torch.bfloat16]
        wide = [p for p in found if getattr(p, "grad_dtype", None) is torch.float32]
        for p in wide:
            p.grad_dtype = None  # torch gives each parameter a gradient of zeros in the parameter's dtype
        try:
            with step_count.trial():
                init(optim)
        finally:
            for p in wide:
                p.grad = None
                p.grad_dtype = torch.float32

    return init_optim_state


_KNOWN = ("first_step", "second_step", "third_step", "train", "eval")  # of SAM and its kin, of schedule-free ones


def check_methods(optimizer: Optimizer, methods: Iterable[str]) -> tuple[str, ...]:
    """Return the given names of methods of an optimizer that rewrite weights.

    Raises:
        HmpxError: one is no method of the optimizer's class, or one that every optimizer has.
    """
    names, cls = (methods,) if isinstance(methods, str) else tuple(methods), type(optimizer)
    own = [name for name in dir(cls) if not name.startswith("_") and not hasattr(Optimizer, name)]
    for name in names:
        if name not in own or not callable(getattr(cls, name)):
            raise HmpxError(
                f"methods: {name!r} is no method that {cls.__name__} has beside those of every optimizer"
                f"{did_you_mean(str(name), own)}"
            )
    return names


def replaced_methods(
    optimizer: Optimizer, reference: Callable[[], Any], methods: tuple[str, ...]
) -> dict[str, Callable]:
    """Return the methods of an attached optimizer, by name. `reference` returns the optimizer while it is alive."""
    known = [name for name in _KNOWN if callable(getattr(type(optimizer), name, None))]
    writing: dict[str, Callable] = {
        name: functools.partial(_other_step, reference, name) for name in (*known, *methods)
    }
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        writing["load_state_dict"] = functools.partial(_own_load, reference)
    return {"__reduce_ex__": functools.partial(_reduce, reference), **writing}


def _other_step(reference: Callable[[], Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method that rewrites weights as a step of the attached optimizer."""
    optimizer = reference()
    return _as_step(optimizer, getattr(type(optimizer), name), args, kwargs)


def _own_load(reference: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
    optimizer = reference()
    own_attachment(optimizer)._checkpoints.load(optimizer, *args, **kwargs)


def watch_step(optimizer: Optimizer, reference: Callable[[], Any], added: dict[str, tuple]) -> None:
    """Take the `step` that somebody has put on an attached optimizer itself as its step: nobody knows what it does.

    added: gets what stands in its place, and what was there.
    """
    step = replaced_step(optimizer)
    if step is None:
        return

    @functools.wraps(step)
    def around(*args: Any, **kwargs: Any) -> Any:
        return _as_step(reference(), lambda _, *args, **kwargs: step(*args, **kwargs), args, kwargs)

    vars(around)["__hmpx_original__"] = step
    ours: Callable = around
    if isinstance(step, types.MethodType):  # LR schedulers look for the function of a method
        ours = types.MethodType(functools.wraps(around)(lambda _, *args, **kwargs: around(*args, **kwargs)), optimizer)
    added["step"] = ours, step
    vars(optimizer)["step"] = ours


def _as_step(optimizer: Optimizer, method: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if not has_bf16(optimizer) or own_attachment(optimizer) is None:  # inside a step, which sees FP32 shadows; detached
        return method(optimizer, *args, **kwargs)
    call = StepCall(optimizer, method, args, kwargs)
    return run_in_region.run_step(optimizer, None, own_attachment(optimizer).step, (call,))


def attach_copy(optimizer: Optimizer, original: Any) -> Any:
    """Attach a copy that has every attribute of `original`; return the copy's own attachment."""
    for name in (ATTRIBUTE, *original._added):
        vars(optimizer).pop(name, None)
    attachment = type(original)(optimizer, original.settings, original.names, methods=original.methods)
    attachment.install()
    return attachment


def _reduce(reference: Callable[[], Any], protocol: int) -> tuple:
    """Reduce an attached optimizer for copies and pickles; torch's own would keep state, groups and defaults alone."""
    optimizer = reference()
    attachment = own_attachment(optimizer)
    attachment.refuse_open("copy or pickle")
    attachment.cast_state_along()
    if step_count.stored(optimizer):
        step_count.keep(optimizer)
    added = {ATTRIBUTE, *attachment._added}
    state = {key: value for key, value in optimizer.__getstate__().items() if key not in added}
    stated = attachment.settings, attachment.names
    how = {"methods": attachment.methods}
    kept = attachment._updates.stores, sorted(weight_keys(optimizer))
    return _rebuild, (type(attachment), type(optimizer), state, stated, how, *kept)


def _rebuild(
    kind: type,
    cls: type[Optimizer],
    state: dict,
    stated: tuple,
    how: dict[str, Any],
    stores: Stores,
    weights: Iterable[str] = (),
) -> Optimizer:
    optimizer = cls.__new__(cls)
    find_again(optimizer, weights)
    optimizer.__setstate__(state)
    step_count.forget(optimizer)
    attachment = kind(optimizer, *stated, **how)
    attachment._updates.stores = stores
    attachment.install()
    return optimizer
