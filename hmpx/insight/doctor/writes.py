"""Tensors in low precision that are updated beside the optimizer: averages of weights, steps by hand, single numbers.

A sample of such a tensor is updated in FP32 too. An update is lost where that moves and the tensor does not.
"""

from __future__ import annotations

import itertools
import types
import weakref
from typing import Any

import torch

from hmpx.insight.doctor.lineage import Marks
from hmpx.insight.doctor.spots import Spots
from hmpx.insight.doctor.twin import sample
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.tensors import name as dtype_name
from hmpx.ops.wrapping.callers import frames, modules

_FEW = 256  # elements of one tensor
AVERAGED = " of torch's AveragedModel"
_ARITHMETIC = ("add", "sub", "mul", "div")
_Factor = tuple[weakref.ref[Tensor], float]  # this tensor times that


class Writes:
    """Counts updates, and those that were lost, by line, in spots of kind "write"."""

    OPS = frozenset(
        f"{before}{name}_"
        for before in ("", "_foreach_")
        for name in (*_ARITHMETIC, "lerp", "addcmul", "addcdiv")
    )  # fmt: skip

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._factors = Marks[_Factor]()

    def before(self, name: str, args: tuple) -> list[Tensor] | None:
        """What is about to be written to, in samples; None where that is no tensor in low precision."""
        targets = args[0] if name.startswith("_foreach_") else [args[0]]
        if not targets or not all(isinstance(t, Tensor) and t.dtype in LOW and t.numel() for t in targets):
            return None
        return [sample(t, _FEW).clone() for t in targets]

    def after(
        self, func: Any, name: str, args: tuple, kwargs: dict, before: list[Tensor], frame: types.FrameType
    ) -> None:
        """The op, in place, is done."""
        several = name.startswith("_foreach_")
        targets = args[0] if several else [args[0]]
        if any((t.requires_grad and not t.is_leaf) or t.grad_fn is not None for t in targets) or _in_forward(frame):
            return
        shapes = [t.shape for t in targets]
        others = [_wide(each, shapes, several) for each in args[1:]]
        if any(each is NotImplemented for each in others):
            return
        exact = [each.float() for each in before]  # a copy, in another dtype
        func(exact if several else exact[0], *others, **{k: _wide(v, shapes, several) for k, v in kwargs.items()})
        for target, old, x in zip(targets, before, exact, strict=True):
            updated = (x != old.float()) & torch.isfinite(x)
            self._count(name, frame, target.numel(), updated, updated & (sample(target, _FEW) == old), old.dtype)

    def follow(self, func: Any, name: str, args: tuple, out: Tensor, frame: types.FrameType) -> None:
        """An op that makes a new tensor: a number that is to change, or d x average + (1 - d) x weights."""
        first, other = (*args, None, None)[:2]
        if not isinstance(first, Tensor) or first.requires_grad or first.grad_fn is not None or name not in _ARITHMETIC:
            return
        if name == "mul" and isinstance(other, int | float):
            self._factors.put(out, (weakref.ref(first), float(other)))
        elif out.dtype not in LOW:
            return
        elif name == "add" and len(args) == 2:
            for product, rest in ((first, other), (other, first)):
                self._average(product, rest, out, frame)
        if not out.dim() and out.dtype in LOW and first.dtype in LOW and not _in_forward(frame):
            exact = func(*(each.float() if isinstance(each, Tensor) else each for each in args))
            changed = (exact != first.float()).reshape(1)
            self._count(name, frame, 1, changed, changed & (out == first), out.dtype)

    def _average(self, product: Any, rest: Any, out: Tensor, frame: types.FrameType) -> None:
        """A sum of which a part may be most of an average, and the rest a little of something else."""
        one, two = self._factors.get(product), self._factors.get(rest)
        average = one[0]() if one else None
        if one is None or two is None or average is None or not 0.5 < one[1] < 1 or abs(one[1] + two[1] - 1) > 1e-6:
            return
        if average.shape != out.shape or average.dtype != out.dtype or _in_forward(frame):
            return
        old, added, new = sample(average, _FEW), sample(rest, _FEW).float(), sample(out, _FEW)
        updated = (added - old.float() * two[1]).abs() > added.abs() / 64  # or else they are equal
        self._count("add", frame, out.numel(), updated, updated & (new == old), out.dtype)

    def _count(
        self, op: str, frame: types.FrameType, elements: int, updated: Tensor, lost: Tensor, dtype: torch.dtype
    ) -> None:
        near = itertools.islice(frames(frame), 4)  # Dynamo, where it was imported, stands around a mode's function
        by_torch = any(each.f_code.co_filename.endswith("swa_utils.py") for each in near)
        spot = self._spots.note("write", op, frame, dtype_name(dtype) + by_torch * AVERAGED)
        spot.add(updates=int(updated.sum()), lost=int(lost.sum()), elements=elements, tensors=1)

    def forget(self) -> None:
        self._factors.forget()


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
