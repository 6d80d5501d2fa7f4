"""How far the weights of a tensor went between two checkpoints, and how far none of their updates would have been lost.

An optimizer moves a weight by about as much whether the weight is large or small. Small weights have a fine grid, on
which rounding hides nothing. So the ways of the finest weights, rounded to the grid of each other weight, are what a
file shows where nothing was lost. `kept` is the way that was gone over this: 1 is healthy, 0 is dead. Stochastic
rounding adds its noise to the way, and gives more than 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor

FEWEST = 256  # weights whose movement is judged
_FINEST, _FEWEST_FINE = 0.05, 64  # the share of the weights whose ways count as not hidden, and how few these may be
_CLEAR = 4  # ulp that such a way should have


@dataclass(frozen=True)
class Movement:
    """The ways of a tensor's weights, from one checkpoint to the next.

    Attributes:
        count: weights that are judged: none that is zero, and none in a row where nothing moved.
        aside: the share of the rows in which nothing moved.
        moved: the share of the judged weights that are not as they were.
        size: the sum of their magnitudes. went: the sum of their ways. expected: what this would be if no update had
            been lost; NaN where that is not known. fine: the median way of the finest weights; NaN likewise.
        unclear: why it is not known.
    """

    count: int
    aside: float
    moved: float
    size: float
    went: float
    expected: float = math.nan
    fine: float = math.nan
    unclear: str = ""

    @property
    def kept(self) -> float:
        return self.went / self.expected


def ulp(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of each weight to the next larger number of a dtype."""
    return torch.ldexp(torch.full_like(weights, torch.finfo(dtype).eps), _exponents(weights, dtype))


def _exponents(weights: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.frexp(weights.abs().clamp(min=torch.finfo(dtype).tiny))[1] - 1


def movement(before: Tensor, after: Tensor, dtype: torch.dtype) -> Movement:
    """Return how far weights went. before, after: rows, in FP32. dtype: whose numbers `after` holds."""
    ways = (after - before).abs().flatten(1)
    rows = ways.amax(1) > 0
    aside = 1 - rows.float().mean().item()
    weights, ways = before.flatten(1)[rows], ways[rows]
    ways, weights = ways[weights != 0], weights[weights != 0]
    count, moved = len(ways), (ways > 0).float().mean().item()
    found = Movement(count, aside, moved, weights.abs().double().sum().item(), ways.double().sum().item())
    if count < FEWEST:
        return replace(found, unclear=f"fewer than {FEWEST} weights moved")
    exponents = _exponents(weights, dtype)
    least = exponents.min()
    counts = (exponents - least).bincount()
    if len(counts) < 2:
        return replace(found, unclear="all weights are of one size")
    grid = ulp(torch.ldexp(torch.ones(len(counts)), torch.arange(len(counts)) + least), dtype)
    upto, share = counts.cumsum(0), _FINEST
    while True:
        fine = exponents - least <= (upto < max(share * count, _FEWEST_FINE)).sum()
        seen = ways[fine]
        if (seen / grid[exponents[fine] - least]).median() >= _CLEAR or share * count <= _FEWEST_FINE:
            break
        share /= 2
    expected = sum(
        ((seen / each).round().double().mean() * each * number).item()
        for each, number in zip(grid, counts, strict=True)
        if number
    )
    if not expected:
        return replace(found, unclear="the finest weights did not move")
    return replace(found, expected=expected, fine=seen.median().item())
