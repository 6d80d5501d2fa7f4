"""The methods of one optimizer that `attach` replaces: the one that copies it, and those that rewrite weights.

Copies and pickles of an attached optimizer are attached in the same way. The class of an attachment comes from the
attachment itself, which imports this file.

`first_step` and `second_step` of sharpness-aware minimisation are called by the training loop; schedule-free optimizers
move between two points in `train` and `eval`. Nothing declares such a method, so hmpx reads its code: it changes
tensors in place or assigns `.data`, itself or in methods of its class that it calls. A method that differentiates needs
the parameters that the graph was built from, and is left alone.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from hmpx.base import region_state
from hmpx.updates.holding.stores import Stores
from hmpx.updates.optimizer_hooks import ATTRIBUTE, attachment_of
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import has_bf16
from hmpx.updates.stepping.step_call import StepCall

_DIFFERENTIATES = {"backward", "autograd"}


def replaced_methods(optimizer: Optimizer, reference: Callable[[], Any]) -> dict[str, Callable]:
    """Return the methods of an attached optimizer, by name. `reference` returns the optimizer while it is alive."""
    writing = {name: functools.partial(_other_step, reference, name) for name in _writing_methods(type(optimizer))}
    return {"__reduce_ex__": functools.partial(_reduce, reference), **writing}


def _other_step(reference: Callable[[], Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method that rewrites weights as a step of the attached optimizer."""
    optimizer = reference()
    method = getattr(type(optimizer), name)
    if not has_bf16(optimizer):  # inside a step of its own, which sees FP32 shadows
        return method(optimizer, *args, **kwargs)
    call = StepCall(optimizer, method, args, kwargs)
    return region_state.run_step(optimizer, None, attachment_of(optimizer).step, (call,))


def attach_copy(optimizer: Optimizer, original: Any) -> Any:
    """Attach a copy that has every attribute of `original`; return the copy's own attachment."""
    for name in (ATTRIBUTE, *original._added):
        vars(optimizer).pop(name, None)
    attachment = type(original)(optimizer, original.settings, original.names, original.places)
    attachment.install()
    return attachment


def _reduce(reference: Callable[[], Any], protocol: int) -> tuple:
    """Reduce an attached optimizer for copies and pickles; torch's own would keep state, groups and defaults alone."""
    optimizer = reference()
    attachment = attachment_of(optimizer)
    attachment.cast_state_along()
    if step_count.stored(optimizer):
        step_count.keep(optimizer)
    added = {ATTRIBUTE, *attachment._added}
    state = {key: value for key, value in optimizer.__getstate__().items() if key not in added}
    stated, stores = (attachment.settings, attachment.names, attachment.places), attachment._updates.stores
    return _rebuild, (type(attachment), type(optimizer), state, stated, stores)


def _rebuild(kind: type, cls: type[Optimizer], state: dict, stated: tuple, stores: Stores) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    step_count.forget(optimizer)
    attachment = kind(optimizer, *stated)
    attachment._updates.stores = stores
    attachment.install()
    return optimizer


def _writing_methods(cls: type[Optimizer]) -> list[str]:
    """Return the public methods of `cls` that rewrite weights; torch's own classes have none."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    names = dict.fromkeys(name for base in own for name, value in vars(base).items() if _function(value) is not None)
    public = [name for name in names if not name.startswith("_") and not hasattr(Optimizer, name)]
    return [name for name in public if _writes(cls, name)]


def _function(value: Any) -> types.FunctionType | None:
    function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
    return function if isinstance(function, types.FunctionType) else None


def _writes(cls: type, name: str) -> bool:
    found, seen = set(), set()
    todo = [name]
    while todo:
        name = todo.pop()
        function = _function(inspect.getattr_static(cls, name, None))
        if name in seen or function is None or name == "step":
            continue
        seen.add(name)
        names = set(_names(function.__code__))
        found |= names
        todo += [each for each in names if not hasattr(Optimizer, each)]
    in_place = any(each.endswith("_") and not each.endswith("__") for each in found)
    return (in_place or "data" in found) and not found & _DIFFERENTIATES


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
