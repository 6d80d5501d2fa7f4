"""The interface of a tensor that is held between two steps, and the key of the random numbers it is written with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from hmpx.rounding import native
from hmpx.rounding.keys import Keys, Span
from hmpx.rounding.native import Rounding
from hmpx.rounding.stochastic import round_all
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import Box, local

Tensor = torch.Tensor


@dataclass(frozen=True)
class RoundingKey:
    """The random numbers of one step depend on this key, the parameter's name and the element's index.

    Attributes:
        pending: collects roundings until `flush`, which does them all in one call. None: each is done at once.
    """

    seed: int
    step: int
    pending: list[Rounding] | None = field(default=None, compare=False)

    def round_into(self, out: Tensor, x: Tensor, name: str, start: int, box: Box | None) -> None:
        """Round FP32 `x` into BF16 `out`, of the same shape.

        Args:
            name: of the parameter, or of a state tensor.
            start: index of the first element, in `box` or in the whole parameter.
            box: where the elements that this rank holds stand; None if it holds the whole parameter.
        """
        if box is None:
            self._round(Rounding(out, x, name, start))
            return
        source, target = x.contiguous().view(-1), out.view(-1) if out.is_contiguous() else None
        rounded = torch.empty_like(source, dtype=out.dtype) if target is None else target
        for begin, end, *place in self.spans(x.numel(), start, box):
            self._round(Rounding(rounded[begin:end], source[begin:end], name, *place))
        if target is None:
            self.flush()
            out.copy_(rounded.view(out.shape))

    def _round(self, rounding: Rounding) -> None:
        if self.pending is None:
            round_all([rounding], self.seed, self.step)
        else:
            self.pending.append(rounding)

    def flush(self) -> None:
        """Do the pending roundings."""
        if self.pending:
            pending = self.pending[:]
            self.pending.clear()
            round_all(pending, self.seed, self.step)

    def keys(self, name: str) -> Keys:
        """Return what the random numbers of a tensor with this name depend on, beside positions."""
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

    kind: ClassVar[int | None] = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def laid(self) -> Tensor:
        """A tensor with the parameter's shape and the strides of the held tensor. Its values mean nothing."""
        return self.tensor

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
