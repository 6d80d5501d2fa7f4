"""The methods of one optimizer that `attach` replaces: the one that copies it, and those that rewrite weights.

Copies and pickles of an attached optimizer are attached in the same way. The class of an attachment comes from the
attachment itself, which imports this file.

A training loop calls `first_step` and `second_step` of sharpness-aware minimisation, and schedule-free optimizers move
between two points in `train` and `eval`. Each such call is a step with a write-back of its own. Other methods that
rewrite weights are named by ``attach(methods=...)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

from hmpx.base import run_in_region
from hmpx.errors import HmpxError, did_you_mean
from hmpx.updates.holding.stores import Stores
from hmpx.updates.optimizer_hooks import ATTRIBUTE, own_attachment
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import has_bf16
from hmpx.updates.stepping.step_call import StepCall

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
    writing = {name: functools.partial(_other_step, reference, name) for name in (*known, *methods)}
    return {"__reduce_ex__": functools.partial(_reduce, reference), **writing}


def _other_step(reference: Callable[[], Any], name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method that rewrites weights as a step of the attached optimizer."""
    optimizer = reference()
    method = getattr(type(optimizer), name)
    if not has_bf16(optimizer):  # inside a step of its own, which sees FP32 shadows
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
    attachment.cast_state_along()
    if step_count.stored(optimizer):
        step_count.keep(optimizer)
    added = {ATTRIBUTE, *attachment._added}
    state = {key: value for key, value in optimizer.__getstate__().items() if key not in added}
    stated = attachment.settings, attachment.names
    how = {"methods": attachment.methods}
    return _rebuild, (type(attachment), type(optimizer), state, stated, how, attachment._updates.stores)


def _rebuild(
    kind: type, cls: type[Optimizer], state: dict, stated: tuple, how: dict[str, Any], stores: Stores
) -> Optimizer:
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    step_count.forget(optimizer)
    attachment = kind(optimizer, *stated, **how)
    attachment._updates.stores = stores
    attachment.install()
    return optimizer
