"""The key of one step's stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hmpx.rounding import eight_bits, halves
from hmpx.rounding.keys import Span, step_key
from hmpx.rounding.native import Rounding
from hmpx.rounding.stochastic import round_all
from hmpx.updates.ranks.sharding import Box

Tensor = torch.Tensor


@dataclass(frozen=True)
class RoundingKey:
    """The random numbers of one step depend on this key, the parameter's name and the element's index."""

    seed: int
    step: int

    @property
    def of_step(self) -> int:
        """The step's part of each tensor's key; the name is the other part."""
        return step_key(self.seed, self.step)

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
        for span in box.spans(start, start + x.numel()):
            here = slice(span.start - start, span.stop - start)
            self._round(Rounding(rounded[here], source[here], name, span.offset, span.width, span.stride))
        if target is None:
            self.flush()
            out.copy_(rounded.view(out.shape))

    def _round(self, rounding: Rounding) -> None:
        round_all([rounding], self.seed, self.step)

    def flush(self) -> None:
        """Do the roundings that `Deferred` has put off."""

    def split_into(self, upper: Tensor, lower: Tensor, x: Tensor, name: str, start: int, box: Box | None) -> None:
        """Round FP32 `x` to 24 bits, which go to BF16 `upper` and int8 `lower`, all of one shape; as `round_into`."""
        halves.split_24(x, upper, lower, self._spans(x.numel(), start, box), (self.seed, self.step, name))

    def encode_into(
        self,
        codes: Tensor,
        x: Tensor,
        scales: Tensor,
        rows: eight_bits.Rows,
        begin: int,
        name: str,
        start: int,
        box: Box | None,
        given: bool,
    ) -> None:
        """Round flat FP32 `x` to flat `codes` of 8 bits, and write the scales unless they are `given`; as `round_into`.

        begin: the first element, counted in `rows`.
        """
        spans, keys = self._spans(x.numel(), start, box), (self.seed, self.step, name)
        eight_bits.encode(codes, x, scales, rows, begin, spans, keys, given)

    def _spans(self, count: int, start: int, box: Box | None) -> list[Span]:
        if box is None:
            return [Span(0, count, start, max(count, 1), 0)]
        spans = box.spans(start, start + count)
        return [Span(each.start - start, each.stop - start, *each[2:]) for each in spans]


@dataclass(frozen=True)
class Deferred(RoundingKey):
    """The key of a step whose roundings are put off until `flush`, which does them all at once."""

    pending: list[Rounding] = field(default_factory=list, compare=False)

    def _round(self, rounding: Rounding) -> None:
        self.pending.append(rounding)

    def flush(self) -> None:
        pending = self.pending[:]
        self.pending.clear()
        round_all(pending, self.seed, self.step)
