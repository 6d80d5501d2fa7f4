"""The key of one step's stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hmpx.rounding.keys import step_key
from hmpx.rounding.stochastic import numbers_into, round_into
from hmpx.updates.ranks.sharding import Box

Tensor = torch.Tensor


@dataclass(frozen=True)
class RoundingKey:
    """What the random numbers of one step depend on, beside the parameter's name and the index of the element."""

    seed: int
    step: int

    @property
    def of_step(self) -> int:
        """What the key of every tensor is derived from, with its name."""
        return step_key(self.seed, self.step)

    def round_into(self, out: Tensor, x: Tensor, name: str, start: int, box: Box | None) -> None:
        """Round FP32 `x` into BF16 `out`, of the same shape.

        Args:
            name: of the parameter, or of a state tensor.
            start: index of the first element, in `box` or in the whole parameter.
            box: where the elements that this rank holds stand; None if it holds the whole parameter.
        """
        if box is None:
            round_into(out, x, self.seed, self.step, name, start)
            return
        source, target = x.contiguous().view(-1), out.view(-1) if out.is_contiguous() else None
        rounded = torch.empty_like(source, dtype=out.dtype) if target is None else target
        for span in box.spans(start, start + x.numel()):
            here = slice(span.start - start, span.stop - start)
            place = span.offset, span.width, span.stride
            round_into(rounded[here], source[here], self.seed, self.step, name, *place)
        if target is None:
            out.copy_(rounded.view(out.shape))

    def numbers(self, like: Tensor, name: str, start: int, box: Box | None) -> Tensor:
        """The numbers by which `round_into` rounds a flat tensor of the size of `like`: 16 bits each, in int32."""
        out = torch.empty(like.numel(), dtype=torch.int32, device=like.device)
        if box is None:
            numbers_into(out, self.seed, self.step, name, start)
            return out
        for span in box.spans(start, start + out.numel()):
            here = slice(span.start - start, span.stop - start)
            numbers_into(out[here], self.seed, self.step, name, span.offset, span.width, span.stride)
        return out
