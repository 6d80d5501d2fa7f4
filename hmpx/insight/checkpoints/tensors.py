"""Every tensor of one or two checkpoints is read once, a part at a time: what its numbers are, and how they moved.

An optimizer moves a weight by about as much whether the weight is large or small. Small weights have a fine grid, on
which rounding hides nothing. So the ways of the finest weights, rounded to the grid of each other weight, are what a
file shows where nothing was lost. `kept` is the way that was gone over this: 1 is healthy, 0 is dead. Stochastic
rounding adds its noise to the way, and gives more than 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from hmpx.insight.checkpoints.opened import Stored
from hmpx.insight.tensors import LOW, exponents_of, ulp

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
    exponents = exponents_of(weights, dtype)
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


_PART = 2**24  # weights that are read at a time, or one row
_SAMPLE = 2**19  # weights of a tensor whose ways are looked at
_LONG_ROW = 256  # the last dimension is a row's, and not a kernel's
_PRUNED = 0.05  # the share of weights that have become zero
_OTHER = 1.0  # the way that weights went, over their size: of two trainings it is 1.4


class Numbers:
    """The numbers of a tensor.

    Attributes:
        is_finite: whether none is inf or NaN. dtype: the narrowest that holds them all. one: their value, if all have
            one; else None. Multiples of one number (masks, bins, codes) are in the dtype that they are stored in.
    """

    def __init__(self, stored: Stored) -> None:
        self.is_finite, self._low = True, [torch.bfloat16, torch.float16] if stored.dtype is torch.float32 else []
        self._stored, self._least, self._most = stored.dtype, float("inf"), -float("inf")
        self._are_multiples = True

    def see(self, part: Tensor) -> None:
        least, most = (each.item() for each in part.aminmax())
        self.is_finite &= abs(least) < float("inf") and abs(most) < float("inf")  # not so for NaN either
        self._least, self._most = min(self._least, least), max(self._most, most)
        self._low = [each for each in self._low if torch.equal(part.to(each).float(), part)]
        if self._low and self._are_multiples:
            sizes = part[part != 0].abs()
            counts = sizes / sizes.amin() if len(sizes) else sizes
            self._are_multiples = torch.equal(counts, counts.round())

    @property
    def dtype(self) -> torch.dtype:
        return self._low[0] if self._low and not self._are_multiples else self._stored

    @property
    def one(self) -> float | None:
        return self._most if self._least == self._most else None


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the last checkpoint, beside the one that it was before.

    Attributes:
        name, shape, count: of the tensor, and how many numbers it has. dtypes: as stored, before and after; only one,
            if nothing was before.
        numbers: of the tensor. were: of the tensor before; None if there is none.
        is_same: whether not one number moved. zeroed: the share of its numbers that are zero now, and were not.
        moved: how its weights moved; None if it has no rows of weights, or is as it was.
        ulp: of the median weight. lost: the share of its weights that a step of the given rate, rounded to nearest,
            leaves where they are.
    """

    name: str
    shape: torch.Size
    dtypes: tuple[torch.dtype, ...]
    numbers: Numbers
    were: Numbers | None
    is_same: bool
    zeroed: float
    moved: Movement | None
    ulp: float
    lost: float

    @property
    def count(self) -> int:
        return self.shape.numel()

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm or a bias."""
        return len(self.shape) == 1 and not self.name.endswith(("running_mean", "running_var"))

    @property
    def why_not(self) -> str:
        """Why its movement does not tell whether updates were lost; "" if it does."""
        if self.moved is None:
            return "it did not move"
        if self.zeroed > _PRUNED:
            return f"pruned ({100 * self.zeroed:.0f} % of it is zero now)"
        if self.moved.went > _OTHER * self.moved.size:
            return "weights moved as far as they are large, as those of another training"
        return self.moved.unclear

    @property
    def tells(self) -> bool:
        """Whether its movement tells whether updates were lost. FP32 loses none."""
        return not self.why_not and self.numbers.dtype in LOW


class Bar:
    """How much is read, on standard error, where that is a terminal."""

    def __init__(self, whole: int) -> None:
        self._whole, self._done, self._began, self._is_drawn = whole, 0, perf_counter(), sys.stderr.isatty()

    def add(self, count: int) -> None:
        self._done += count
        if self._is_drawn:
            seconds = perf_counter() - self._began
            left = f", {seconds * (self._whole / self._done - 1):.0f} s left" if seconds > 1 else ""
            line = f"doctor: {100 * self._done / self._whole:3.0f} % of {self._whole / 1e6:.0f} M numbers{left}"
            print(f"\r{line:78}", end="" if self._done < self._whole else "\r" + " " * 78 + "\r", file=sys.stderr)


def _parts(shape: torch.Size) -> Iterator[tuple[int, int]]:
    rows = shape[0] if shape else 1
    at_once = max(1, _PART // max(1, shape[1:].numel()))
    return ((first, min(first + at_once, rows)) for first in range(0, rows, at_once))


def _sampled(part: Tensor, whole: int) -> Tensor:
    """Return rows of a part of a tensor that has `whole` numbers: all, or as many as make a sample."""
    if part.dim() < 2:
        part = part.reshape(-1, 1)
    rows = part.flatten(0, -2) if part.shape[-1] >= _LONG_ROW else part.flatten(1)
    return rows[:: -(-whole // _SAMPLE)].float()


def seen(name: str, before: Stored | None, after: Stored, rate: float, bar: Bar) -> FileTensor:
    """Read a tensor, and the one before it that has its shape. rate: of a step; 0 where it is not known."""
    numbers, were = Numbers(after), Numbers(before) if before else None
    is_same, samples = before is not None, []
    for first, last in _parts(after.shape):
        part = after.rows(first, last)
        if not part.numel():
            continue
        numbers.see(part)
        old = before.rows(first, last) if before else None
        if old is not None and were:
            were.see(old)
            is_same = is_same and torch.equal(old.to(part.dtype), part)
        samples.append([_sampled(each, after.shape.numel()) for each in (part, old) if each is not None])
        bar.add(part.numel() * (1 + (old is not None)))
    dtypes = tuple(each.dtype for each in (before, after) if each)
    now, *earlier = (torch.cat(each) for each in zip(*samples, strict=True)) if samples else (torch.empty(0, 1),)
    weights = earlier[0] if earlier else now
    digits = ulp(weights, numbers.dtype).flatten()
    digit, lost = (digits.median().item(), (digits > 2 * rate).float().mean().item()) if len(digits) else (0.0, 0.0)
    zeroed, moved = 0.0, None
    if len(after.shape) > 1 and earlier and not is_same and numbers.is_finite and were and were.is_finite:
        zeroed = ((now == 0) & (weights != 0)).float().mean().item()
        moved = movement(weights.to(numbers.dtype).float(), now, numbers.dtype)
    return FileTensor(name, after.shape, dtypes, numbers, were, is_same, zeroed, moved, digit, lost)
