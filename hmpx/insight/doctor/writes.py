"""Tensors in low precision that are updated in place beside the optimizer: averages of weights, steps by hand.

A sample of such a tensor is updated in FP32 too. An update is lost where that moves and the tensor does not.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from hmpx.insight.doctor.spots import Spots
from hmpx.insight.doctor.twin import sample
from hmpx.insight.tensors import LOW, Tensor
from hmpx.ops.callers import modules

_FEW = 256  # elements of one tensor


class Writes:
    """Counts updates, and those that were lost, by line, in spots of kind "write"."""

    OPS = frozenset(
        f"{before}{name}{after}"
        for before in ("", "_foreach_")
        for name in ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv")
        for after in ("_",)
    )

    def __init__(self, spots: Spots) -> None:
        self._spots = spots

    def before(self, name: str, args: tuple) -> list[Tensor] | None:
        """What is about to be written to, in samples; None where that is no tensor in low precision."""
        targets = args[0] if name.startswith("_foreach_") else [args[0]]
        if not targets or not all(isinstance(t, Tensor) and t.dtype in LOW and t.numel() > 1 for t in targets):
            return None
        return [sample(t, _FEW).clone() for t in targets]

    def after(
        self, func: Any, name: str, args: tuple, kwargs: dict, before: list[Tensor], frame: types.FrameType
    ) -> None:
        """The op is done."""
        several = name.startswith("_foreach_")
        targets = args[0] if several else [args[0]]
        if any((t.requires_grad and not t.is_leaf) or t.grad_fn is not None for t in targets) or _in_forward(frame):
            return
        wide = [each.float() for each in before]
        shapes = [t.shape for t in targets]
        others = [_wide(each, shapes, several) for each in args[1:]]
        if any(each is NotImplemented for each in others):
            return
        settings = {key: _wide(value, shapes, several) for key, value in kwargs.items()}
        exact = [each.clone() for each in wide]
        func(exact if several else exact[0], *others, **settings)
        spot = self._spots.note("write", name, frame, str(targets[0].dtype).removeprefix("torch."))
        for target, old, new, x in zip(targets, before, map(lambda t: sample(t, _FEW), targets), exact, strict=True):
            updated = (x != old.float()) & torch.isfinite(x)
            spot.add(updates=int(updated.sum()), lost=int((updated & (new == old)).sum()), elements=target.numel())


def _wide(value: Any, shapes: list[torch.Size], several: bool) -> Any:
    """An argument for the samples in FP32; NotImplemented where it has another shape."""
    if isinstance(value, Tensor):
        if value.dim() == 0:
            return value.float() if value.dtype in LOW else value
        return sample(value, _FEW).float() if value.shape == shapes[0] else NotImplemented
    if several and isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value):
        parts = [_wide(each, [shape], False) for each, shape in zip(value, shapes, strict=True)]
        return NotImplemented if any(part is NotImplemented for part in parts) else parts
    return value


def _in_forward(frame: types.FrameType) -> bool:
    """Whether a module's forward is running: what it writes to is no average."""
    each: types.FrameType | None = frame
    while each is not None:
        if each.f_code.co_name in ("_call_impl", "forward") and next(modules(each), None) is not None:
            return True
        each = each.f_back
    return False
