"""Gradients that `release_gradients` has freed during backward, after the step of their parameter.

Until `optimizer.step()`, code that reads these gradients would find None and treat it as zero: a clipped training run
would train unclipped. So gradient clipping, norms of gradients and GradScaler are made to raise. So is `zero_grad()`,
which would drop gradients that are in the weights already, and the step of another optimizer of these parameters. A
loss that a GradScaler has scaled raises in backward, before any parameter steps.

`torch.nn.utils` holds each of its functions in the closure of a wrapper. hmpx replaces the content of that cell, as
`step_hooks` does, which reaches every name that somebody has imported the wrapper by.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_leaves

from hmpx.base.changes import Attribute, Cell, Changes
from hmpx.errors import HmpxError
from hmpx.updates.stepping.names import parameters

logger = logging.getLogger("hmpx")
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

_gone: dict[torch.Tensor, str] = {}  # until its optimizer's step is finished: the name of that optimizer's class
_stepped_by: dict[torch.Tensor, weakref.ref[Optimizer]] = {}  # who has released it last, until a claim begins or ends
_asked = threading.local()  # now: whether one of these functions is running in this thread

# Each function, and the argument in which it is given parameters or gradients.
_CLIPPING = {
    clip_grad.clip_grad_norm_: "parameters",
    clip_grad.clip_grad_value_: "parameters",
    clip_grad._clip_grads_with_norm_: "parameters",
    clip_grad._get_total_norm: "tensors",
}
_UNSCALE = "_unscale_grads_"  # of GradScaler: `unscale_` and `step` both end in it
_SCALE = "scale"  # of GradScaler
_scaled_backward = -1  # the last backward of a loss that a GradScaler has scaled, as autograd counts them


def release(p: Parameter, optimizer: Optimizer) -> None:
    """Free the gradient of a parameter that has stepped."""
    p.grad = None
    _gone[p], _stepped_by[p] = type(optimizer).__name__, weakref.ref(optimizer)


def is_released(p: Parameter) -> bool:
    """Whether the gradient was released, and the optimizer's step is not finished yet."""
    return p in _gone


def refuse_scaled(optimizer: Optimizer) -> None:
    """Raise in the backward of a scaled loss, before a parameter steps with a gradient 65536 times too large.

    Raises:
        HmpxError: this backward began at what `GradScaler.scale` returned.
    """
    now = torch._C._current_graph_task_id()
    if now != -1 and now == _scaled_backward:
        raise HmpxError(
            f"GradScaler: this loss is scaled, and {type(optimizer).__name__} is attached with release_gradients=True, "
            "so each parameter would step in backward with its scaled gradient, before anything unscales it; no weight "
            "has been changed. Call loss.backward() without the scaler (BF16 needs none), or attach with "
            "release_gradients=False"
        )


def refuse_stolen(optimizer: Optimizer) -> None:
    """Raise in a step whose gradients another optimizer has used in backward and freed.

    Raises:
        HmpxError: another one, which this one does not hold inside, releases the gradients of some of its parameters.
    """
    if _stepped_by:
        owners = [_stepped_by[p]() for p in parameters(optimizer) if p in _stepped_by and p.grad is None]
        held = [optimizer, *vars(optimizer).values()]
        others = [owner for owner in owners if owner is not None and not any(owner is each for each in held)]
        if others:
            own, other = type(optimizer).__name__, type(others[0]).__name__
            raise HmpxError(
                f"{own}: {len(others)} of its parameters have no gradient: {other} has them too, is attached with "
                "release_gradients=True, and has stepped each in backward, so this one would never step. Give each "
                "parameter to one optimizer, or attach with release_gradients=False"
            )


def finish(params: Iterable[Parameter]) -> None:
    """Forget these released gradients: their step is done."""
    if _gone:
        for p in params:
            _gone.pop(p, None)


def forget(params: Iterable[Parameter]) -> None:
    """Forget parameters that their optimizer does not release any more; warn if it has not ended its last step."""
    params = list(params)
    open_steps = [_gone[p] for p in params if p in _gone]
    if open_steps:
        logger.warning(
            "hmpx: %d parameters of %s have stepped in a backward() that no optimizer.step() followed "
            "(release_gradients=True): their weights have moved all the same",
            len(open_steps),
            open_steps[0],
        )
    finish(params)
    disown(params)


def disown(params: Iterable[Parameter]) -> None:
    """Forget who has released these gradients last: a new optimizer of theirs has not missed any."""
    for p in params:
        _stepped_by.pop(p, None)


def watch(changes: Changes) -> None:
    """Make clipping, norms, GradScaler and `zero_grad` raise for gradients that are gone, until `changes` end."""
    for function, argument in _CLIPPING.items():
        cell = cell_of(function)
        changes.put(Cell(cell, f"torch.nn.utils.{function.__name__}"), _watched(cell.cell_contents, argument))
    for name, around in ((_UNSCALE, _watched_unscale), (_SCALE, _watched_scale)):
        for cls in _scalers(name):
            changes.put(Attribute(cls, name, f"{cls.__name__}.{name}"), around(vars(cls)[name]))
    for cls, held in ((Optimizer, parameters), (torch.nn.Module, torch.nn.Module.parameters)):
        changes.put(Attribute(cls, "zero_grad", f"{cls.__name__}.zero_grad"), _watched_zero(cls.zero_grad, held))


def cell_of(function: Any) -> types.CellType:
    """Return the closure cell in which a decorated function of torch holds the original."""
    return function.__closure__[function.__code__.co_freevars.index("func")]


def _scalers(method: str) -> Iterator[type]:
    """Yield GradScaler, and the classes derived from it that have their own `method`, as FSDP's does."""
    classes = [torch.amp.GradScaler]
    for cls in classes:
        classes += [sub for sub in cls.__subclasses__() if sub not in classes]
        if method in vars(cls):
            yield cls


def _watched(function: Callable, argument: str) -> Callable:
    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if not _gone or getattr(_asked, "now", False):  # clip_grad_norm_ calls two of the others
            return function(*args, **kwargs)
        _asked.now = True
        try:
            if args:
                args = (_looked_at(function, argument, args[0]), *args[1:])
            elif argument in kwargs:
                kwargs[argument] = _looked_at(function, argument, kwargs[argument])
            return function(*args, **kwargs)
        finally:
            _asked.now = False

    return watched


def _looked_at(function: Callable, argument: str, given: Any) -> Any:
    """Return `given` as a sequence; raise if some of the gradients are gone."""
    items = [given] if isinstance(given, torch.Tensor) else list(given)
    name = function.__name__.removeprefix("_")
    if argument == "parameters":
        _refuse(name, items)
    elif not items or any(item is None for item in items):  # of gradients, which do not say whose they are
        _refuse(name, list(_gone))
    if isinstance(given, torch.Tensor):
        return given
    return (item for item in items) if isinstance(given, types.GeneratorType) else items  # torch tells them apart


def _watched_zero(zero_grad: Callable, held: Callable[[Any], Iterable[torch.Tensor]]) -> Callable:
    @functools.wraps(zero_grad)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _gone and (gone := [_gone[p] for p in held(self) if p in _gone]):
            raise HmpxError(
                f"zero_grad: {gone[0]} is attached with release_gradients=True, and {len(gone)} parameters have "
                "stepped in backward() already: their weights have moved, so these gradients cannot be dropped any "
                "more. A program that skips steps, or calls backward() for something else than a step, needs "
                "release_gradients=False, or a recipe without it (bf16-sr; torchao-bf16-sr has BF16 state, as lean). "
                "Gradients of inputs alone: torch.autograd.grad. optimizer.step() ends this step"
            )
        return zero_grad(self, *args, **kwargs)

    return watched


def _watched_unscale(unscale: Callable) -> Callable:
    @functools.wraps(unscale)
    def watched(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _gone:
            _refuse("GradScaler", parameters(optimizer))
        return unscale(scaler, optimizer, *args, **kwargs)

    return watched


def _watched_scale(scale: Callable) -> Callable:
    @functools.wraps(scale)
    def watched(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = scale(scaler, *args, **kwargs)
        if scaler.is_enabled() and not torch.compiler.is_compiling():
            for loss in tree_leaves(scaled):
                if isinstance(loss, torch.Tensor) and loss.requires_grad:
                    loss.register_hook(_remember_backward)
        return scaled

    return watched


def _remember_backward(gradient: torch.Tensor) -> None:
    global _scaled_backward
    _scaled_backward = torch._C._current_graph_task_id()


def _refuse(what: str, params: list[Any]) -> None:
    gone = [_gone[p] for p in params if isinstance(p, torch.Tensor) and p in _gone]
    if gone:
        raise HmpxError(
            f"{what}: the gradients of {len(gone)} parameters are gone: {gone[0]} is attached with "
            "release_gradients=True, so each parameter has stepped, with its gradient as it was, and freed it in "
            f"backward. Attach with release_gradients=False, or leave {what} out; optimizer.step() ends this step"
        )
