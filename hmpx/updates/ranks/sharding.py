"""Where the elements that one rank holds stand in the whole parameter.

A parameter of FSDP2 or of tensor parallelism is a DTensor: this rank holds a box of it, cut along one dimension or
more. An optimizer that treats each element by itself can be given the box as a plain tensor; the random numbers of
stochastic rounding belong to elements of the whole parameter, so a box must know where they are. Other tensors are
whole.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from hmpx.errors import HmpxError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor

PLAIN = (Tensor, torch.nn.Parameter)  # classes that are no DTensor's


class Span(NamedTuple):
    """Elements `start` to `stop` of a box: rows of `width` elements that begin `stride` apart in the whole."""

    start: int
    stop: int
    offset: int
    width: int
    stride: int


class Box(NamedTuple):
    """A box of the whole parameter, row-major: rows of `width` elements that are neighbours in the whole.

    `loops` says where the rows begin, as (count, stride) of nested loops, the outermost first.
    """

    offset: int
    width: int
    loops: tuple[tuple[int, int], ...]

    @classmethod
    def cut(cls, whole: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Box:
        """The box of `sizes` that begins at `offsets`, both by dimension, in a tensor of the shape `whole`."""
        strides = [1] * len(whole)
        for d in range(len(whole) - 1, 0, -1):
            strides[d - 1] = strides[d] * whole[d]
        loops: list[tuple[int, int]] = []
        width, full = 1, True  # full: all dimensions so far are there from end to end
        for d in range(len(whole) - 1, -1, -1):
            if full:
                width *= sizes[d]
            elif loops and loops[0][0] * loops[0][1] == strides[d]:
                loops[0] = (loops[0][0] * sizes[d], loops[0][1])  # one loop goes on where the other begins anew
            elif sizes[d] > 1:
                loops.insert(0, (sizes[d], strides[d]))
            full = full and sizes[d] == whole[d]
        return cls(sum(o * s for o, s in zip(offsets, strides, strict=True)), width, tuple(loops))

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Elements `start` to `stop` of the box, in as few pieces as two loops can walk."""
        count, stride = self.loops[-1] if self.loops else (1, 0)
        while start < stop:
            sheet, within = divmod(start, count * self.width)
            row, column = divmod(within, self.width)
            offset = self.offset + self._begin(sheet) + row * stride + column
            rows = min(count - row, (stop - start) // self.width)
            if column or not rows:
                length = width = min(self.width - column, stop - start)
            else:
                length, width = rows * self.width, self.width
            yield Span(start, start + length, offset, width, stride)
            start += length

    def _begin(self, sheet: int) -> int:
        """Where a sheet begins: all rows of the last loop."""
        begin = 0
        for count, stride in reversed(self.loops[:-1]):
            sheet, position = divmod(sheet, count)
            begin += position * stride
        return begin


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not imported here, which takes long: a DTensor's maker has
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`, as a plain tensor of the same memory; under `torch.no_grad()`."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(sharded: DTensor, held: Tensor) -> DTensor:
    """The DTensor, sharded as `sharded` is, of which this rank holds `held`."""
    return type(sharded).from_local(
        held, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def held_part(param: Tensor, value: Tensor) -> Tensor:
    """The part of `value` for what this rank holds of `param`; `value` may be sharded in any way, or not at all."""
    if is_sharded(param):
        if is_sharded(value):
            if value.placements == param.placements:
                return local(value)
            return local(value.redistribute(param.device_mesh, param.placements))
        sizes, offsets = _sizes_and_offsets(param.shape, param.device_mesh, param.placements)
        return value[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    return value.full_tensor() if is_sharded(value) else value


def box_of(tensor: Tensor, name: str) -> Box | None:
    """Where this rank's elements of a DTensor stand; None for a tensor that is whole."""
    if not is_sharded(tensor):
        return None
    try:
        return _box(tensor.shape, tensor.device_mesh, tensor.placements, local(tensor).shape)
    except HmpxError as error:
        raise HmpxError(f"parameter {name!r} of the shape {tuple(tensor.shape)}: {error}") from None


@functools.lru_cache(maxsize=4096)
def _box(whole: torch.Size, mesh: Any, placements: tuple, held: torch.Size) -> Box:
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor.placement_types import _StridedShard

    if any(isinstance(placement, Partial) for placement in placements):
        raise HmpxError("it is a partial sum, which cannot be updated")
    for placement in placements:
        if isinstance(placement, _StridedShard):
            dim = placement.dim
            ways = math.prod(mesh.size(i) for i, other in enumerate(placements) if getattr(other, "dim", None) == dim)
            if whole[dim] % ways:
                raise HmpxError(f"cut {ways} ways along dimension {dim} by FSDP and tensor parallelism, unevenly")
    sizes, offsets = _sizes_and_offsets(whole, mesh, placements)
    if tuple(held) != tuple(sizes):
        raise HmpxError(f"this rank holds {tuple(held)}, the placements say {tuple(sizes)}")
    return Box.cut(tuple(whole), tuple(sizes), tuple(offsets))


def sizes_and_offsets(sharded: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What this rank holds of a DTensor, by dimension, and where that begins."""
    return _sizes_and_offsets(sharded.shape, sharded.device_mesh, sharded.placements)


def _sizes_and_offsets(whole: torch.Size, mesh: Any, placements: tuple) -> tuple[tuple[int, ...], tuple[int, ...]]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(whole, mesh, placements)
