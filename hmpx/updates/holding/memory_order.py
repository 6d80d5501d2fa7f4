"""The layout of tensors in memory, and how to cut a part out of a tensor that is not contiguous.

torch's fused kernels read weight, gradient and state as flat arrays. So tensors that are stepped together get one
layout, that of ``torch.empty_like(parameter)``. It is dense, and the parameter's own where that is dense.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

Tensor = torch.Tensor
Order = tuple[int, ...]  # of dimensions, the outermost in memory first


@functools.lru_cache(maxsize=4096)
def _order(shape: torch.Size, strides: tuple[int, ...]) -> Order:
    dense = torch.empty_strided(shape, strides, device="meta")
    strides = torch.empty_like(dense).stride()
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))


def memory_order(tensor: Tensor) -> Order:
    """The dimensions in the order in which `torch.empty_like(tensor)` lays them."""
    return _order(tensor.shape, tensor.stride())


def lies_flat(tensor: Tensor, order: Order) -> bool:
    """Whether the elements of `tensor`, with its dimensions in this order, follow one another in memory."""
    return tensor.permute(order).is_contiguous()


def unfolded(flat: Tensor, sizes: tuple[int, ...], order: Order) -> Tensor:
    """A flat tensor as a view of shape `sizes`; it holds the dimensions in this order."""
    permuted = flat.view([sizes[d] for d in order])
    return permuted.permute([order.index(d) for d in range(len(order))])


def laid_as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of `tensor` in the layout of `torch.empty_like(like)`."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


def boxes(sizes: tuple[int, ...], order: Order, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Elements `start` ... `stop - 1`, counted with the dimensions in this order, as a few rectangular boxes."""
    for begins, ends in _boxes([sizes[d] for d in order], start, stop):
        box = [slice(0)] * len(order)
        for d, begin, end in zip(order, begins, ends, strict=True):
            box[d] = slice(begin, end)
        yield tuple(box)


def _boxes(sizes: list[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Start and stop of each box: the rest of a first row, whole rows, the begin of a last row."""
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
