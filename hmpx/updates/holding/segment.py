"""Segments: which elements of a parameter an optimizer sees at once, where they lie, and how they are held.

A step in batches takes a large parameter in parts. A `Segment` says which elements a part has, how they lie in memory,
and where they stand in the whole parameter: the rounding depends on that.

torch's fused kernels read weight, gradient and state as flat arrays. So tensors that are stepped together get one
layout, that of ``torch.empty_like(parameter)``. It is dense, and the parameter's own where that is dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from hmpx.updates.ranks.sharding import Box, is_sharded, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Weights = Literal["stochastic", "nearest", "master", "split", "split8"]
Order = tuple[int, ...]  # of dimensions, the outermost in memory first


@functools.lru_cache(maxsize=4096)
def _order(shape: torch.Size, strides: tuple[int, ...]) -> Order:
    dense = torch.empty_strided(shape, strides, device="meta")
    strides = torch.empty_like(dense).stride()
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))


def memory_order(tensor: Tensor) -> Order:
    """Return the dimensions in the order in which `torch.empty_like(tensor)` lays them."""
    return _order(tensor.shape, tensor.stride())


def unfolded(flat: Tensor, sizes: tuple[int, ...], order: Order) -> Tensor:
    """View a flat tensor, which holds the dimensions in this order, in the shape `sizes`."""
    permuted = flat.view([sizes[d] for d in order])
    return permuted.permute([order.index(d) for d in range(len(order))])


def laid_as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy `tensor` into the layout of `torch.empty_like(like)`."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


def boxes(sizes: tuple[int, ...], order: Order, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Cut elements `start` ... `stop - 1`, counted with the dimensions in this order, into a few rectangular boxes."""
    for begins, ends in _boxes([sizes[d] for d in order], start, stop):
        box = [slice(0)] * len(order)
        for d, begin, end in zip(order, begins, ends, strict=True):
            box[d] = slice(begin, end)
        yield tuple(box)


def _boxes(sizes: list[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield start and stop of each box: the rest of a first row, whole rows, the begin of a last row."""
    if not sizes:
        yield [], []
        return
    row = math.prod(sizes[1:])
    first, last = -(-start // row) if row else 0, stop // row if row else sizes[0]
    if first > last:  # within one row
        for begins, ends in _boxes(sizes[1:], start - last * row, stop - last * row):
            yield [last, *begins], [first, *ends]
        return
    if start < first * row:
        for begins, ends in _boxes(sizes[1:], start - (first - 1) * row, row):
            yield [first - 1, *begins], [first, *ends]
    if first < last:
        yield [first, *(0 for _ in sizes[1:])], [last, *sizes[1:]]
    if last * row < stop:
        for begins, ends in _boxes(sizes[1:], 0, stop - last * row):
            yield [last, *begins], [last + 1, *ends]


class Way(NamedTuple):
    """How one BF16 parameter is held between two steps: the settings that may differ by parameter.

    See `hmpx.attach`.
    """

    weights: Weights = "stochastic"
    state_dtype: torch.dtype | Literal["8bit"] = torch.float32


USUAL = Way()


@dataclass(frozen=True, eq=False)
class Segment:
    """A whole parameter, in its shape, or its elements `start` ... `stop - 1`, flat.

    Of a sharded parameter, only the elements that this rank holds are counted.

    Attributes:
        start, stop: None for a whole parameter.
        order: the dimensions in the order in which elements are counted; None is row-major. A parameter that is not
            contiguous is stepped in the order of its memory.
        index: cuts a block out of the parameter, for a part that has been split by `blocks`.
        box: where the elements of a shard stand in the whole parameter; None if the parameter is whole.
        at: index of the first element, in the box or in the whole parameter.
        overlaps: another parameter that shares elements in memory with this one.
        way: how the parameter is held between steps.
    """

    param: Parameter
    name: str
    start: int | None = None
    stop: int | None = None
    order: Order | None = None
    index: tuple[slice, ...] | None = None
    box: Box | None = None
    at: int = 0
    overlaps: Parameter | None = None
    way: Way = USUAL

    def of(self, tensor: Tensor) -> Tensor:
        """View this segment of a tensor that is shaped like the parameter; under `torch.no_grad()`.

        A part with an `order` must be split by `blocks` first.
        """
        tensor = local(tensor)
        if self.start is None:
            return tensor
        return tensor[self.index] if self.index is not None else tensor.view(-1)[self.start : self.stop]

    def flat_view(self, tensor: Tensor) -> Tensor | None:
        """View this part of a tensor flat; None if its elements do not follow one another in memory."""
        if self.order is None:
            return self.of(tensor)
        tensor = local(tensor).permute(self.order)
        return tensor.view(-1)[self.start : self.stop] if tensor.is_contiguous() else None

    def parts(self, size: int, order: Order | None, ends: Callable[[int], int] | None = None) -> Iterator[Segment]:
        """Cut a whole parameter into parts of about `size` elements.

        ends: the last element up to a given one where a part may end; None: any. Where none is near, a part is larger.
        """
        start = 0
        while True:  # a rank may hold nothing, and has state all the same
            stop = min(start + size, self.count)
            if ends is not None and stop < self.count:
                stop = _end(start, stop, self.count, ends)
            yield replace(self, start=start, stop=stop, order=order, at=start)
            start = stop
            if start >= self.count:
                return

    def blocks(self, shown: Tensor) -> list[tuple[Segment, Tensor]]:
        """Split into segments that `of` can cut out of a tensor of the parameter's shape, with their parts of `shown`.

        shown: the tensor that the optimizer sees for this segment.
        """
        if self.order is None or self.start is None or self.stop is None:
            return [(self, shown)]
        blocks, begin, sizes = [], 0, local(self.param).shape
        for index in boxes(sizes, self.order, self.start, self.stop):
            block = tuple(i.stop - i.start for i in index)
            end = begin + math.prod(block)
            segment = replace(self, start=self.start + begin, stop=self.start + end, order=None, index=index)
            if self.order == tuple(range(len(sizes))):
                segment = replace(segment, at=self.start + begin)
            else:
                segment = replace(segment, at=0, box=Box.cut(tuple(sizes), block, tuple(i.start for i in index)))
            blocks.append((segment, unfolded(shown[begin:end], block, self.order)))
            begin = end
        return blocks

    def mark_written(self) -> None:
        """Tell autograd of a write: a sharded parameter has no version count of the tensor that it holds."""
        if self.box is not None:
            torch.autograd.graph.increment_version(self.param)

    @property
    def is_gathered(self) -> bool:
        """Whether the optimizer sees a whole parameter of which this rank holds a shard."""
        return self.start is None and self.box is not None and is_sharded(self.param)

    @property
    def grad(self) -> Tensor:
        """The gradient of the segment's parameter."""
        grad = self.param.grad
        assert grad is not None, f"{self.name} has no gradient"
        return grad

    @property
    def offset(self) -> int:
        return self.start or 0

    @property
    def count(self) -> int:
        if self.start is None or self.stop is None:
            return local(self.param).numel()
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.offset + self.count == local(self.param).numel()


def _end(start: int, stop: int, count: int, ends: Callable[[int], int]) -> int:
    """Return the end of a part from `start` to about `stop`."""
    end = ends(stop)
    while end <= start and stop < count:
        stop = min(2 * stop - start, count)
        end = ends(stop)
    return end if start < end and stop < count else count
