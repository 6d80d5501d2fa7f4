"""Trials: runs in which some ops alone are in low precision. Of which ops, in which batches, and what they come to.

**The problem.** An estimate is right within a factor of two or three where errors are small, autograd sees the op, and
no decision changes. A run of its own tells in any case; one for each op and batch takes longer than all else together.

**The choice.** Where the lists as a whole do little harm, no op does much: only a sight of the worst is wanted, and of
those that autograd does not see. Else whatever may break it is run: by the estimates, and what stands right before a
decision that changed, or where inf or NaN is first seen. Each is run once, in the batch in which it looks worst. Then
all others are run together. Where they still break it, they are halved until single ops are found, or groups of which
no half does. Runs that are left go, in other batches, to what is nearly broken or changes the loss unexpectedly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.noise import Noise, mean_square, square
from hmpx.insight.comparing.row import FELT, Row
from hmpx.insight.tensors import Tensor

_SUSPECT = 0.03  # an estimate of a gradient error that may be one of `FELT`
_EXPLAINED = 0.5  # of the gradient error of the lists, by the estimates
_LINEAR = 0.5  # of the change of the loss, by which a run may be off the estimate
_RUNS, _ROWS = 4, 8  # how many runs there are of few batches; how many sites are run alone before the rest is together
_BEFORE = 2  # sites before each decision that changed
_MORE = 8  # runs to halve the rest, beyond those that one op takes to be found

Effect = tuple[float, list[Tensor]]  # what it changes: the loss, and the gradients
Run = Callable[[Collection[Compared], int], Effect]  # what some sites alone change in a batch


def suspects(rows: Mapping[Compared, Row], noise: Noise, first: Compared | None, broken: bool) -> list[Compared]:
    """The sites to be run alone, in the order in which they look worst.

    first: where inf or NaN is first seen. broken: whether the lists as a whole break the training.
    """
    known = {site: row for site, row in rows.items() if can_run_alone(site, row)}
    seen = {site: row.gradient_error for site, row in known.items() if site.differentiable}
    unseen = [site for site in known if not site.differentiable]
    least = FELT if not broken else _SUSPECT if _explained(rows, noise) else 0.0
    worst = [site for site, look in seen.items() if look >= least or (broken and math.isnan(look))]
    worst.sort(key=lambda site: (-seen[site] if seen[site] >= 0 else 0.0, -known[site].error))
    likely = [site for site in worst if seen[site] >= FELT]
    unseen.sort(key=lambda site: -known[site].error)
    before = _before_decisions(rows, known) if broken else []
    in_turn = itertools.zip_longest(unseen, worst[len(likely) :])
    rest = (site for pair in in_turn for site in pair if site)
    must = dict.fromkeys([*([first] if first in known else []), *before, *likely])
    found = list(must | dict.fromkeys(rest))
    if not broken:
        return found[: min(_ROWS, runs_of(noise))]
    return found[: max(min(len(must), _ROWS), runs_of(noise) - 1)]  # one run is of all others together


def can_run_alone(site: Compared, row: Row) -> bool:
    """Whether a run of this site alone in low precision would tell anything."""
    return bool(row.error) and not site.not_compared and not site.raised


def runs_of(noise: Noise) -> int:
    """How many trials there are to be."""
    return max(noise.batches, _RUNS)


def _before_decisions(deciding: Iterable[Compared], known: Mapping[Compared, Row]) -> list[Compared]:
    """The sites that ran in low precision right before decisions that the lists have changed."""
    calls = {(number[0], call.order): site for site in known for number, call in site.calls.items() if call.is_low}
    order = sorted(calls)
    found: dict[Compared, None] = {}
    for site in deciding:
        for batch, at in site.changed_at[:1]:
            earlier = [place for place in order if place[0] == batch and place[1] <= at]
            found |= dict.fromkeys(calls[place] for place in reversed(earlier[-_BEFORE:]))
    return list(found)[: _ROWS // 2]


def worst_batches(along: Sequence[float], errors: Sequence[float]) -> list[int]:
    """All batches: first those in which a site, by its estimates, and the lists as a whole do most.

    An estimate for one batch is v . e, in which chance has a part; the lists as a whole are several sites.
    """
    shares = zip(_shares([e * e for e in along]), _shares(errors), strict=True)
    looks = [sum(share) for share in shares]
    return sorted(range(len(looks)), key=lambda batch: -looks[batch])


def repeat(trials: Sequence[Trial], rows: Mapping[Compared, Row], noise: Noise, run: Run, runs: int) -> None:
    """Make so many more runs, in turn, of the trials that other batches may change."""
    waiting, explained = list(trials), _explained(rows, noise)
    while runs > 0 and waiting:
        trial = waiting.pop(0)
        if trial.batches and (trial.is_near(noise) or not trial.is_linear or not explained):
            trial.add(trial.batches.pop(0), run)
            waiting.append(trial)
            runs -= 1


def halved(group: Sequence[Compared], breaks: Callable[[Sequence[Compared]], bool]) -> list[list[Compared]]:
    """Of a group that breaks it together, smaller parts that do: single sites, or groups of which neither half does."""
    waiting, found = [list(group)], []
    runs = 2 * math.ceil(math.log2(max(len(group), 2))) + _MORE
    while waiting and runs > 0:
        part = waiting.pop(0)
        halves = (part[: len(part) // 2], part[len(part) // 2 :]) if len(part) > 1 else ()
        runs -= len(halves)
        broken = [half for half in halves if breaks(half)]
        waiting[:0] = broken
        if not broken:
            found.append(part)
    return [*found, *(part for part in waiting if len(part) == 1)]


def _explained(rows: Mapping[Compared, Row], noise: Noise) -> bool:
    """Whether what the lists do as a whole is about what the estimates add up to."""
    known = [row.gradient_error for site, row in rows.items() if row.error and site.differentiable]
    return noise.error < FELT or math.hypot(*known) >= _EXPLAINED * noise.error


def _shares(values: Sequence[float]) -> list[float]:
    """Of their sum; where one is not finite, that is all of it."""
    whole = sum(values)
    if math.isfinite(whole):
        return [value / (whole or 1.0) for value in values]
    return [float(not math.isfinite(value)) for value in values]


def in_noise(effect: Effect, noise: Noise) -> float:
    """The gradient error of a run; infinite where it ended in inf or NaN, NaN where there is no noise to measure by."""
    squares = _squares(effect)
    return noise.in_noise(squares) if math.isfinite(squares) else math.inf


def _squares(effect: Effect) -> float:
    change, gradients = effect
    return (square(gradients) if gradients else 0.0) if math.isfinite(change) else math.inf


@dataclass
class Trial:
    """The runs of one site.

    batches: those in which it is not run yet, those in which it looks worst first. changes: of the loss, by batch.
    squares: of the changes of the gradients, the squared norms.
    """

    site: Compared
    batches: list[int]
    changes: dict[int, float] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)

    def add(self, batch: int, run: Run) -> None:
        """Make the run of one batch."""
        effect = run([self.site], batch)
        if self.site.not_compared:
            return
        self.changes[batch] = effect[0]
        self.squares.append(_squares(effect))

    @property
    def is_linear(self) -> bool:
        """Whether the loss changes as estimated."""
        known = self.site.loss_change
        away = _LINEAR * math.sqrt(mean_square(known))
        return all(abs(change - known[batch]) <= away for batch, change in self.changes.items())

    def is_near(self, noise: Noise) -> bool:
        """Whether it breaks the training in a batch, or nearly so."""
        return self.error(noise) >= FELT / 2

    def error(self, noise: Noise) -> float:
        """The gradient error in the worst batch that was run."""
        worst = max(self.squares, default=math.nan)
        return worst if worst == math.inf else noise.in_noise(worst)

    def row(self, estimated: Row, noise: Noise) -> Row:
        """A row of estimates, with what the runs say in their place."""
        if not self.squares:
            return replace(estimated, note=f"not compared: {self.site.not_compared}", gradient_error=math.nan)
        if math.inf in self.squares:
            return replace(estimated, loss_change=math.nan, gradient_error=math.inf, measured=True)
        if not noise.batches or math.isnan(noise.noise):
            return replace(estimated, measured=True)
        error = noise.in_noise(sum(self.squares) / len(self.squares))
        known = self.changes
        if self.is_linear or (self.site.differentiable and error < FELT):  # the estimates of other batches are good
            known = {**dict(enumerate(self.site.loss_change)), **known}
        change = math.sqrt(mean_square([*known.values()]))
        return replace(estimated, loss_change=change, gradient_error=error, measured=True)
