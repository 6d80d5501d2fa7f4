"""What a step moves: tensors that are held between two steps, and the segments that an optimizer sees at once.

A step in batches takes a large parameter in parts. A `Segment` says which elements a part has, how they lie in memory,
and where they stand in the whole parameter. Rounding depends on this place, and on the `RoundingKey` of the step.

torch's fused kernels read weight, gradient and state as flat arrays. So tensors that are stepped together get one
layout, that of ``torch.empty_like(parameter)``: the parameter's own if it is dense, else a dense one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.coding import CodeName
from hmpx.rounding.keys import Keys, Span
from hmpx.rounding.stochastic import Rounding, round_all
from hmpx.updates.ranks.sharding import Box, is_sharded, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Weights = Literal["stochastic", "nearest", "master", "split", "split8"]
StateDtype = torch.dtype | CodeName
Order = tuple[int, ...]  # of dimensions, the outermost in memory first


@functools.lru_cache(maxsize=4096)
def _order(shape: torch.Size, strides: tuple[int, ...]) -> Order:
    dense = torch.empty_strided(shape, strides, device="meta")
    strides = torch.empty_like(dense).stride()
    return tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], d)))


def memory_order(tensor: Tensor) -> Order:
    """Return the dimensions of ``torch.empty_like(tensor)``, those with the largest strides first."""
    return _order(tensor.shape, tensor.stride())


def laid_as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy `tensor` into the layout of `torch.empty_like(like)`."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


class Way(NamedTuple):
    """How one BF16 parameter is held between two steps. See the arguments of `hmpx.attach` with these names.

    They are the settings that may differ from parameter to parameter.
    """

    weights: Weights = "stochastic"
    state_dtype: StateDtype = torch.float32

    @property
    def is_coded(self) -> bool:
        """Whether state of the parameter's shape is held in codes."""
        return isinstance(self.state_dtype, str)


USUAL = Way()


@dataclass(frozen=True, eq=False)
class Segment:
    """A whole parameter, or a part of it: its elements `start` ... `stop - 1` in row-major order.

    A whole parameter has its own shape; a part is flat, or in rows. Of a shard, only the elements here are counted.

    Attributes:
        start, stop: both None for a whole parameter.
        by_rows: whether the part is in rows of the first dimension. It is if weights, gradient or state are not
            contiguous.
        box: where the elements of a shard stand in the whole parameter; None if the parameter is not sharded.
        at: the index of the segment's first element in the box; without a box, in the parameter.
        way: how the parameter is held between steps.
    """

    param: Parameter
    name: str
    start: int | None = None
    stop: int | None = None
    by_rows: bool = False
    box: Box | None = None
    at: int = 0
    way: Way = USUAL

    def of(self, tensor: Tensor) -> Tensor:
        """View this segment of a tensor that is shaped like the parameter; under `torch.no_grad()`."""
        tensor = local(tensor)
        if self.start is None or self.stop is None:
            return tensor
        if self.by_rows:
            row = tensor.numel() // len(tensor)
            return tensor[self.start // row : self.stop // row]
        return tensor.view(-1)[self.start : self.stop]

    def parts(self, size: int, ends: Callable[[int], int] | None = None, *, by_rows: bool = False) -> Iterator[Segment]:
        """Cut a whole parameter into parts of about `size` elements.

        ends: returns the last place up to a given one where a part may end. None: a part may end anywhere.
        """
        start = 0
        while True:  # a rank that holds no element has state all the same, so there is always one part
            stop = min(start + size, self.count)
            if ends is not None and stop < self.count:
                stop = _end(start, stop, self.count, ends)
            yield replace(self, start=start, stop=stop, by_rows=by_rows, at=start)
            start = stop
            if start >= self.count:
                return

    def mark_written(self) -> None:
        """Tell autograd of a write to a shard: the version of the DTensor does not count writes to its local tensor."""
        if self.box is not None:
            torch.autograd.graph.increment_version(self.param)

    @property
    def is_gathered(self) -> bool:
        """Whether the optimizer sees the whole of a parameter that is sharded, and not this rank's shard."""
        return self.start is None and self.box is not None and is_sharded(self.param)

    @property
    def grad(self) -> Tensor:
        """The gradient of the segment's parameter."""
        grad = self.param.grad
        assert grad is not None, f"{self.name} has no gradient"
        return grad

    @property
    def first(self) -> int | None:
        """The index, in the whole parameter, of this rank's first element; None if its elements have gaps there."""
        return 0 if self.box is None else None if self.box.loops else self.box.offset

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
    """Return the end of a part from `start` to about `stop`, or to a later end where none is near."""
    end = ends(stop)
    while end <= start and stop < count:
        stop = min(2 * stop - start, count)
        end = ends(stop)
    return end if start < end and stop < count else count


@dataclass(frozen=True)
class RoundingKey:
    """The seed and the number of one step. Its random numbers depend on these, on names and on indices of elements.

    Attributes:
        pending: the roundings that wait for `flush`, which does all of them in one call of the kernels.
    """

    seed: int
    step: int
    pending: list[Rounding] = field(default_factory=list, compare=False, repr=False)

    def round_into(self, out: Tensor, x: Tensor, name: str, start: int, box: Box | None) -> None:
        """Let the next `flush` round FP32 `x` into BF16 `out`, which has the same shape.

        Args:
            name: the name of the parameter, or of a state tensor.
            start: the index of the first element in `box`; without a box, in the parameter.
            box: where this rank's elements stand in the whole parameter; None if it is not sharded.
        """
        self.pending.append(Rounding(out, x, name, self.spans(x.numel(), start, box)))

    def flush(self) -> None:
        """Do the pending roundings."""
        pending = self.pending[:]
        self.pending.clear()
        if pending:
            round_all(pending, self.seed, self.step)

    def keys(self, name: str) -> Keys:
        """Return the seed, the step and the name, from which the keys of the random numbers are derived."""
        return self.seed, self.step, name

    @staticmethod
    def spans(count: int, start: int, box: Box | None) -> list[Span]:
        """Return where `count` elements stand in the whole parameter; see `round_into`."""
        if box is None:
            return [Span(0, count, start, max(count, 1), 0)]
        spans = box.spans(start, start + count)
        return [Span(each.start - start, each.stop - start, *each[2:]) for each in spans]


class Held:
    """A tensor that is held between two steps, with the data beside it. All methods need `torch.no_grad()`.

    Attributes:
        tensor: a gradient, weights or state, in the shape of the parameter or in another one.
        kind: the number by which kernels know this way to hold a tensor. None: no kernel knows it, and torch's
            operators move the tensor.
    """

    kind: int | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def itself(self, segment: Segment) -> Tensor | None:
        """Return the segment of the held tensor if a step may work on it without a copy; else None."""
        return None

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        """Return the held tensor, which is contiguous, in the form that kernels take; None if they cannot take it.

        name: the hash of the name on which the random numbers depend.
        """
        return None if self.kind is None else native.StoredTensor(local(self.tensor.detach()), self.kind, name)

    def read(self, segment: Segment, out: Tensor) -> None:
        """Copy a segment into `out`, in FP32."""
        out.copy_(segment.of(self.tensor))

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Write a segment's FP32 result back. Callers write the segments of a parameter in order.

        name: the name on which the random numbers depend.
        """
        raise NotImplementedError
