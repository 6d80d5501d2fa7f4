"""What a step moves: tensors that are held between two steps, and the segments that an optimizer sees at once.

A step in batches takes a large parameter in parts. A `Segment` says which elements a part has, how they lie in memory,
and where they stand in the whole parameter: the rounding depends on that, and on the `RoundingKey` of the step.

torch's fused kernels read weight, gradient and state as flat arrays. So tensors that are stepped together get one
layout, that of ``torch.empty_like(parameter)``. It is dense, and the parameter's own where that is dense.
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
    """Return the dimensions in the order in which `torch.empty_like(tensor)` lays them."""
    return _order(tensor.shape, tensor.stride())


def laid_as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy `tensor` into the layout of `torch.empty_like(like)`."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


class Way(NamedTuple):
    """How one BF16 parameter is held between two steps: the settings that may differ by parameter.

    See `hmpx.attach`.
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
    """A whole parameter, in its shape, or its elements `start` ... `stop - 1` in row-major order, flat or as rows.

    Of a sharded parameter, only the elements that this rank holds are counted.

    Attributes:
        start, stop: None for a whole parameter.
        by_rows: whether a part is shown as rows of the first dimension, since weights, gradient or state are not
            contiguous.
        box: where the elements of a shard stand in the whole parameter; None if the parameter is whole.
        at: index of the first element, in the box or in the whole parameter.
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

        ends: the last element up to a given one where a part may end; None: any. Where none is near, a part is larger.
        """
        start = 0
        while True:  # a rank may hold nothing, and has state all the same
            stop = min(start + size, self.count)
            if ends is not None and stop < self.count:
                stop = _end(start, stop, self.count, ends)
            yield replace(self, start=start, stop=stop, by_rows=by_rows, at=start)
            start = stop
            if start >= self.count:
                return

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
    def first(self) -> int | None:
        """The index, in the whole parameter, of the first element that this rank holds; None where there are gaps."""
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
    """Return the end of a part from `start` to about `stop`."""
    end = ends(stop)
    while end <= start and stop < count:
        stop = min(2 * stop - start, count)
        end = ends(stop)
    return end if start < end and stop < count else count


@dataclass(frozen=True)
class RoundingKey:
    """The random numbers of one step depend on this key, the parameter's name and the element's index.

    Attributes:
        pending: what is to be rounded; `flush` does it all in one call of the kernels.
    """

    seed: int
    step: int
    pending: list[Rounding] = field(default_factory=list, compare=False, repr=False)

    def round_into(self, out: Tensor, x: Tensor, name: str, start: int, box: Box | None) -> None:
        """Let FP32 `x` be rounded into BF16 `out`, of the same shape, by the next `flush`.

        Args:
            name: of the parameter, or of a state tensor.
            start: index of the first element, in `box` or in the whole parameter.
            box: where the elements that this rank holds stand; None if it holds the whole parameter.
        """
        self.pending.append(Rounding(out, x, name, self.spans(x.numel(), start, box)))

    def flush(self) -> None:
        """Do the pending roundings."""
        pending = self.pending[:]
        self.pending.clear()
        if pending:
            round_all(pending, self.seed, self.step)

    def keys(self, name: str) -> Keys:
        """Return the seed, the step and the name: random numbers depend on these, and on positions."""
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
        tensor: a gradient, weights or state, in the shape of the parameter or in one of its own.
        kind: the number by which the C kernels know this way to hold a tensor. None: they do not know it, and torch's
            operators move the tensor.
    """

    kind: int | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def itself(self, segment: Segment) -> Tensor | None:
        """Return the held memory itself if a step may work on it without a copy, else None."""
        return None

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        """Describe a segment of contiguous tensors to the kernels; None where they cannot read and write it.

        name: the hash of the name that the random numbers depend on.
        """
        return None if self.kind is None else native.StoredTensor(local(self.tensor.detach()), self.kind, name)

    def read(self, segment: Segment, out: Tensor) -> None:
        """Copy a segment into `out`, in FP32."""
        out.copy_(segment.of(self.tensor))

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Write a segment's FP32 result back. The segments of a parameter are written in order.

        name: the name that the random numbers depend on.
        """
        raise NotImplementedError
