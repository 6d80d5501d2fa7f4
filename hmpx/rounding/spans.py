"""Positions of a flat tensor's elements in the whole parameter, on which their random numbers depend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hmpx.rounding.stochastic import numbers_into

Tensor = torch.Tensor
Keys = tuple[int, int, str]  # seed, step, name


class Span(NamedTuple):
    """Elements `start` to `stop` of a tensor: rows of `width` elements, `stride` apart in the whole, from `offset`."""

    start: int
    stop: int
    offset: int
    width: int
    stride: int

    @property
    def has_one_key(self) -> bool:
        """Whether all of them are among the first 2^32 elements of the parameter."""
        rows = max(self.stop - self.start - 1, 0) // self.width
        return self.offset + rows * self.stride + self.width <= 2**32


def numbers_of(like: Tensor, spans: Sequence[Span], keys: Keys) -> Tensor:
    """The random numbers by which `round_into` rounds a flat tensor of this size: 16 bits each, in int32."""
    out = torch.empty(like.numel(), dtype=torch.int32, device=like.device)
    for span in spans:
        numbers_into(out[span.start : span.stop], *keys, span.offset, span.width, span.stride)
    return out
