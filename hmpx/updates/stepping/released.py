"""Gradients under `release_gradients`: backward frees each one after the step of its parameter.

Until `optimizer.step()`, a `Released` stands in its place: a tensor without memory, of which every operation raises.
None would not do. Clipping, norms, GradScaler, a second backward and the step of another optimizer take None for zero,
so a clipped training run would train unclipped. `Optimizer.zero_grad()` raises too: the update is in the weights.

The backward of a loss that a GradScaler has scaled raises before any parameter steps.

A step of one parameter costs the host about as much as a step of ten. So gradients wait, behind their `Released`, until
there are enough of them or the backward pass ends. Then their parameters step together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from hmpx.base.changes import Attribute, Changes
from hmpx.base.torch_private import RELEASED, graph_task, private, tree_leaves
from hmpx.errors import HmpxError
from hmpx.updates.holding.sharding import is_sharded, local
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
_Where = tuple[torch.device, Any]  # a device, and its stream on which backward makes the gradients

_MAKE = private("torch.Tensor._make_wrapper_subclass")

_is_used = False  # whether a gradient was ever released
_scaled_backward = -1  # autograd's number of the last backward pass of a loss that a GradScaler has scaled


class Released(torch.Tensor):
    """A tensor without memory, in the place of a gradient that waits or was freed."""

    optimizer: str

    @staticmethod
    def __new__(cls, gradient: torch.Tensor, optimizer: Optimizer) -> Released:
        like: dict[str, Any] = {"strides": gradient.stride(), "dtype": gradient.dtype, "device": gradient.device}
        made = _MAKE(_class_of_shards() if is_sharded(gradient) else cls, gradient.shape, **like)
        made.optimizer = type(optimizer).__name__
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _error(str(func), next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Released)))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<a gradient of {self.optimizer} that was released>"


@functools.cache
def _class_of_shards() -> type[Released]:
    """Return the class of those in the place of DTensors: FSDP2 adds to no other gradient, and asks what it is."""
    from torch.distributed.tensor import DTensor

    def gone(self: Released) -> NoReturn:
        raise _error("a use of the shard", self)

    return type("ReleasedShard", (Released, DTensor), dict.fromkeys(("_local_tensor", "_spec"), property(gone)))


def _error(what: str, gradient: Released) -> HmpxError:
    return HmpxError(
        f"{what}: this gradient is gone: {gradient.optimizer} is attached with release_gradients=True, so each "
        "parameter steps in backward(), with its gradient as it is, and frees it. For clipping, norms, GradScaler, "
        "accumulation, skipped steps or a second optimizer of a parameter set release_gradients=False, or take a "
        "recipe without it (bf16-sr-8bit has 8-bit state, as lean8; torchao-bf16-sr BF16 state, as lean; bf16-sr). "
        "transformers' Trainer always measures the norm of gradients. To end this step, call "
        "optimizer.step(). For gradients of inputs alone there is torch.autograd.grad"
    )


class Waiting:
    """Gradients of one optimizer that are complete, but whose parameters have not stepped yet.

    Those of one device and stream wait until they have `ELEMENTS` elements, or on a GPU `ELEMENTS_OF_ACCELERATORS`.

    Attributes:
        taken: the ids of parameters that have taken the next step in backward, or wait to take it.
    """

    ELEMENTS = 1 << 20
    ELEMENTS_OF_ACCELERATORS = 1 << 25

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self._gradients: dict[_Where, list[tuple[Parameter, torch.Tensor, Released]]] = {}
        self._elements: dict[_Where, int] = {}
        self._marks: dict[int, Released] = {}  # by the id of the parameter, kept for the next steps
        self._backward = -1  # autograd's number of the backward pass in which `is_first` was last asked

    def __reduce__(self) -> tuple[type[Waiting], tuple[()]]:
        return Waiting, ()  # the gradients wait for the original, and none for its copy

    def add(self, p: Parameter, optimizer: Optimizer) -> bool:
        """Let a gradient wait. Return whether it is time to step: enough of them wait, or no backward pass runs."""
        global _is_used
        gradient, where = p.grad, _where(p)
        assert gradient is not None, "it is complete"
        mark = self._marks.get(id(p))
        if mark is None or mark.dtype is not gradient.dtype or mark.shape != gradient.shape or p.device != mark.device:
            self._marks[id(p)] = mark = Released(gradient, optimizer)
        self._gradients.setdefault(where, []).append((p, gradient, mark))
        self._elements[where] = elements = self._elements.get(where, 0) + p.numel()
        p.grad, _is_used = mark, True
        self.taken.add(id(p))
        most = self.ELEMENTS if p.device.type == "cpu" else self.ELEMENTS_OF_ACCELERATORS
        return elements >= most or graph_task() == -1

    def is_first(self) -> bool:
        """Return whether a backward pass runs, and this is the first call in it."""
        before, self._backward = self._backward, graph_task()
        return self._backward not in (-1, before)

    def ready(self) -> list[_Where]:
        """Return the devices and streams whose gradients wait."""
        return list(self._gradients)

    def show(self, where: _Where) -> list[Parameter]:
        """Give the parameters that wait there their gradients again, for a step. After it, call `end_wait`."""
        waiting = self._gradients[where]
        for p, gradient, _ in waiting:
            p.grad = gradient
        if where[1] is not None and where[1] != (now := torch.cuda.current_stream(where[0])):
            now.wait_stream(where[1])
            for _, gradient, _ in waiting:
                local(gradient).record_stream(now)
        return [p for p, _, _ in waiting]

    def end_wait(self, have_stepped: Callable[[list[Parameter]], bool], *wheres: _Where) -> list[Parameter]:
        """End the wait at `wheres`, or everywhere. Free the gradients of parameters that have stepped, keep the others.

        Returns:
            The parameters that have not stepped, which have their gradients again.
        """
        back: list[Parameter] = []
        for where in wheres or self.ready():
            waiting = self._gradients[where]
            are_stepped = have_stepped([p for p, _, _ in waiting])
            for p, gradient, mark in waiting:
                p.grad = mark if are_stepped else gradient
            back += [] if are_stepped else [p for p, _, _ in waiting]
            del self._gradients[where], self._elements[where]
        self.taken.difference_update(map(id, back))
        return back

    def forget(self) -> None:
        """Drop all gradients that wait."""
        for waiting in self._gradients.values():
            for p, _, _ in waiting:
                p.grad = None
        for each in (self._gradients, self._elements, self._marks, self.taken):
            each.clear()


def _where(p: Parameter) -> _Where:
    return p.device, torch.cuda.current_stream(p.device) if p.is_cuda else None


def refuse_scaled(optimizer: Optimizer) -> None:
    """Raise in the backward of a scaled loss, before a parameter steps with a gradient that is scaled.

    Raises:
        HmpxError: this backward began at what `GradScaler.scale` returned.
    """
    now = graph_task()
    if now != -1 and now == _scaled_backward:
        raise HmpxError(
            f"GradScaler: this loss is scaled, and {type(optimizer).__name__} is attached with release_gradients=True, "
            "so each parameter would step in backward with its scaled gradient, before anything unscales it; no weight "
            "has been changed. Call loss.backward() without the scaler (BF16 needs none), or attach with "
            "release_gradients=False"
        )


def finish(params: Iterable[Parameter]) -> None:
    """Set each gradient that is a `Released` to None."""
    for p in params:
        if isinstance(p.grad, Released):
            p.grad = None


def watch(changes: Changes, zeroed: Callable[[Optimizer], None]) -> None:
    """Until `changes` end, note each backward of a scaled loss, and let `zero_grad` refuse released gradients.

    zeroed: is called with the optimizer of each `zero_grad`.
    """
    scaler = torch.amp.GradScaler
    changes.put(Attribute(scaler, "scale", "GradScaler.scale"), _watched_scale(scaler.scale))
    changes.put(Attribute(Optimizer, "zero_grad", "Optimizer.zero_grad"), _watched_zero(zeroed, Optimizer.zero_grad))


def _watched_zero(zeroed: Callable, zero_grad: Callable) -> Callable:
    @functools.wraps(zero_grad)
    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        zeroed(optimizer)
        if _is_used:
            for p in parameters(optimizer):
                if isinstance(p.grad, Released):
                    raise _error("zero_grad", p.grad)
        zero_grad(optimizer, *args, **kwargs)

    return watched


def _watched_scale(scale: Callable) -> Callable:
    @functools.wraps(scale)
    def watched(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scaled = scale(scaler, *args, **kwargs)
        if scaler.is_enabled() and not torch.compiler.is_compiling() and not RELEASED.missing:
            for loss in tree_leaves(scaled):
                if isinstance(loss, torch.Tensor) and loss.requires_grad:
                    loss.register_hook(_remember_backward)
        return scaled

    return watched


def _remember_backward(gradient: torch.Tensor) -> None:
    global _scaled_backward
    _scaled_backward = graph_task()
