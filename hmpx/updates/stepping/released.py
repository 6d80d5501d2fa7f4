"""Gradients that `release_gradients` has freed during backward, after the step of their parameter.

Until `optimizer.step()`, a `Released` stands in their place: a tensor without memory, of which every operation raises.
Clipping, norms, GradScaler, a second backward and the step of another optimizer would take None for zero: a clipped
training run would train unclipped. `Optimizer.zero_grad()` raises too: what it would drop is in the weights.

A loss that a GradScaler has scaled raises in backward, before any parameter steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hmpx.base.changes import Attribute, Changes
from hmpx.errors import HmpxError
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

_is_used = False  # whether a gradient was ever released
_scaled_backward = -1  # the last backward of a loss that a GradScaler has scaled, as autograd counts them


class Released(torch.Tensor):
    """What stands in the place of a gradient that was freed."""

    optimizer: str

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, optimizer: Optimizer) -> Released:
        like: dict[str, Any] = {"strides": gradient.stride(), "dtype": gradient.dtype, "device": gradient.device}
        made = torch.Tensor._make_wrapper_subclass(cls, gradient.shape, **like)
        made.optimizer = type(optimizer).__name__
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _error(str(func), next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Released)))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient of {self.optimizer} that was released>"


def _error(what: str, gradient: Released) -> HmpxError:
    return HmpxError(
        f"{what}: this gradient is gone: {gradient.optimizer} is attached with release_gradients=True, so each "
        "parameter has stepped, with its gradient as it was, and freed it in backward. Clipping, norms, "
        "GradScaler, accumulation, skipped steps and a second optimizer of a parameter need "
        "release_gradients=False, or a recipe without it (bf16-sr; torchao-bf16-sr has BF16 state, as lean). "
        "Gradients of inputs alone: torch.autograd.grad. optimizer.step() ends this step"
    )


def release(p: Parameter, optimizer: Optimizer) -> None:
    """Free the gradient of a parameter that has stepped."""
    global _is_used
    assert p.grad is not None, "the parameter has stepped"
    p.grad, _is_used = Released(p.grad, optimizer), True


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


def finish(params: Iterable[Parameter]) -> None:
    """Remove what stands in the place of these gradients."""
    for p in params:
        if type(p.grad) is Released:
            p.grad = None


def watch(changes: Changes) -> None:
    """Let scaled losses be known and `zero_grad` refuse to drop what has been released, until `changes` end."""
    scaler = torch.amp.GradScaler
    changes.put(Attribute(scaler, "scale", "GradScaler.scale"), _watched_scale(scaler.scale))
    changes.put(Attribute(Optimizer, "zero_grad", "Optimizer.zero_grad"), _watched_zero(Optimizer.zero_grad))


def _watched_zero(zero_grad: Callable) -> Callable:
    @functools.wraps(zero_grad)
    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if _is_used:
            for p in parameters(optimizer):
                if type(p.grad) is Released:
                    raise _error("zero_grad", p.grad)
        zero_grad(optimizer, *args, **kwargs)

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
