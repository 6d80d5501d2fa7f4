"""Trials: runs in which one op alone is in low precision. Of which ops, in which batches, and what they come to.

**The problem.** An estimate is right within a factor of two or three where errors are small, and autograd sees the op.
A run of its own tells in any case; one for each op and batch takes longer than everything else together.

**The choice.** Where the lists as a whole do little harm, no op does much: only a sight of the worst is wanted, and of
those that autograd does not see. Else whatever may break it is run; where the estimates do not explain the harm, the
next ones too. Each is run once, in the batch in which it looks worst; what is broken there or nearly so, or changes the
loss otherwise than estimated, in others too. In all there are at most as many runs as batches, or four.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.noise import Noise, mean_square, square
from hmpx.insight.comparing.row import BROKEN, Row
from hmpx.insight.tensors import Tensor

_SUSPECT = 0.03  # an estimate of a gradient error that may be one of `BROKEN`
_EXPLAINED = 0.5  # of the gradient error of the lists, by the estimates
_LINEAR = 0.5  # of the change of the loss, by which a run may be off the estimate
_RUNS, _ROWS = 4, 8  # how many runs there may be of few batches; how many rows of many

Run = Callable[[Compared, int], tuple[float, list[Tensor]]]  # what a site alone changes in a batch: loss and gradients


def suspects(rows: Mapping[Compared, Row], noise: Noise) -> list[Compared]:
    """The sites to be run alone, in the order in which they look worst."""
    seen = {site: row.gradient_error for site, row in rows.items() if row.error and site.differentiable}
    unseen = [site for site, row in rows.items() if row.error and not site.differentiable]
    least = BROKEN if not noise.error >= BROKEN else _SUSPECT if _explained(rows, noise) else 0.0
    worst = sorted((site for site, look in seen.items() if look >= least), key=lambda site: -seen[site])
    broken = [site for site in worst if seen[site] >= BROKEN]
    unseen.sort(key=lambda site: -rows[site].error)
    in_turn = itertools.zip_longest(unseen, worst[len(broken) :])
    return [*broken, *(site for pair in in_turn for site in pair if site)][: min(_ROWS, _runs(noise))]


def worst_batches(along: Sequence[float], errors: Sequence[float]) -> list[int]:
    """All batches: first those in which a site, by its estimates, and the lists as a whole do most.

    An estimate for one batch is v . e, in which chance has a part; the lists as a whole are several sites.
    """
    shares = zip(_shares([e * e for e in along]), _shares(errors), strict=True)
    looks = [sum(share) for share in shares]
    return sorted(range(len(looks)), key=lambda batch: -looks[batch])


def make(trials: Sequence[Trial], rows: Mapping[Compared, Row], noise: Noise, run: Run) -> None:
    """Make the runs of these trials."""
    waiting, explained = list(trials), _explained(rows, noise)
    for _ in range(_runs(noise)):
        if not waiting:
            return
        trial = waiting.pop(0)
        trial.add(trial.batches.pop(0), run)
        if trial.batches and (trial.is_near(noise) or not trial.is_linear or not explained):
            waiting.append(trial)


def _runs(noise: Noise) -> int:
    return max(noise.batches, _RUNS)


def _explained(rows: Mapping[Compared, Row], noise: Noise) -> bool:
    """Whether what the lists do as a whole is about what the estimates add up to."""
    known = [row.gradient_error for site, row in rows.items() if row.error and site.differentiable]
    return noise.error < BROKEN or math.hypot(*known) >= _EXPLAINED * noise.error


def _shares(values: Sequence[float]) -> list[float]:
    """Of their sum; where one is not finite, that is all of it."""
    whole = sum(values)
    if math.isfinite(whole):
        return [value / (whole or 1.0) for value in values]
    return [float(not math.isfinite(value)) for value in values]


@dataclass
class Trial:
    """The runs of one site.

    batches: those in which it is not run yet, those in which it looks worst first. changes: of the loss, by batch.
    squares, total: of the changes of the gradients, the squared norms and the sum.
    """

    site: Compared
    batches: list[int]
    changes: dict[int, float] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)
    total: list[Tensor] = field(default_factory=list)

    def add(self, batch: int, run: Run) -> None:
        """Make the run of one batch."""
        self.changes[batch], gradients = run(self.site, batch)
        self.squares.append(square(gradients))
        self.total = [a + b for a, b in zip(self.total, gradients, strict=True)] if self.total else gradients

    @property
    def is_linear(self) -> bool:
        """Whether the loss changes as estimated."""
        known = self.site.loss_change
        away = _LINEAR * math.sqrt(mean_square(known))
        return all(abs(change - known[batch]) <= away for batch, change in self.changes.items())

    def is_near(self, noise: Noise) -> bool:
        """Whether it breaks the training in a batch, or nearly so."""
        return noise.in_noise(max(self.squares)) >= BROKEN / 2

    def row(self, estimated: Row, noise: Noise) -> Row:
        """A row of estimates, with what the runs say in their place."""
        error = noise.in_noise(sum(self.squares) / len(self.squares))
        known = self.changes
        if self.is_linear or (self.site.differentiable and error < BROKEN):  # the estimates of other batches are good
            known = {**dict(enumerate(self.site.loss_change)), **known}
        return replace(
            estimated,
            loss_change=math.sqrt(mean_square([*known.values()])),
            gradient_error=error,
            gradient_bias=self._bias(error, estimated, noise),
            measured=True,
        )

    def _bias(self, error: float, estimated: Row, noise: Noise) -> float:
        """|mean of the changes|^2 times the batches there are, of the pairs of those that were run; or as estimated."""
        runs, whole = len(self.squares), sum(self.squares)
        if not math.isfinite(whole):
            return math.inf
        if runs == 1:
            return error * estimated.gradient_bias / (estimated.gradient_error or math.nan)
        shared = (square(self.total) - whole) / (runs * (runs - 1))
        return noise.in_noise(max(whole / runs + (noise.batches - 1) * shared, 0.0))
