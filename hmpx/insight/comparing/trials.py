"""Trials: runs in which a few ops alone have low precision. Of which ops, in which batches, and what they show.

**The problem.** An estimate is right within a factor of two or three where errors are small, autograd sees the op, and
no decision changes. A run of its own tells in any case; one for each op and batch takes longer than all else together.

**The choice.** Where the lists as a whole do little harm, no op does much: then only the ops that look worst are run,
and those that autograd does not see. Else every op is run that may break the training: by its estimate, right before a
decision that changed, or where inf or NaN is first seen. Each is run once, in the batch in which it looks worst. Then
all others are run together. Where they still break it, they are halved until single ops are found, or a group of which
neither half does. The runs that are left go to ops that break it or nearly do, in other batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hmpx.insight.comparing.calls import CallSite
from hmpx.insight.comparing.noise import Noise, mean_square, square
from hmpx.insight.comparing.row import FELT, Row, projected
from hmpx.insight.tensors import Tensor

_RUNS, _ROWS = 4, 8  # how many runs there are of few batches; how many sites are run alone before the rest is together
_BEFORE = 2  # sites before each decision that changed
_MORE = 8  # runs to halve the rest, beyond those that one op takes to be found

Effect = tuple[float, list[Tensor]]  # what a run changes: the loss, and the gradients
Run = Callable[[Collection[CallSite], int], Effect]  # runs some sites alone in a batch


@dataclass
class Trial:
    """The runs of one site. batches: those in which it was not run yet, the worst first; changes: of the loss;
    squares: the squared norms of the changes of the gradients."""

    site: CallSite
    batches: list[int]
    changes: list[float] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)

    def add(self, batch: int, effect: Effect) -> None:
        self.batches.remove(batch)
        if not self.site.not_compared:
            self.changes.append(effect[0])
            self.squares.append(_squares(effect))

    def error(self, noise: Noise) -> float:
        """Return the gradient error in the worst batch that was run."""
        return _in_noise(max(self.squares, default=math.nan), noise)

    def row(self, estimated: Row, noise: Noise) -> Row:
        """Return a row of estimates with the measurements in their place."""
        if not self.squares:
            return replace(estimated, note=f"not compared: {self.site.not_compared}", gradient_error=math.nan)
        if math.inf in self.squares:
            return replace(estimated, loss_change=math.nan, gradient_error=math.inf, measured=True)
        if not noise.batches or math.isnan(noise.noise):
            return replace(estimated, measured=True)
        error = noise.in_noise(sum(self.squares) / len(self.squares))
        change = math.sqrt(mean_square(self.changes))
        return replace(estimated, loss_change=change, gradient_error=error, measured=True)


class Trials:
    """Runs what is to be run, and puts the measurements into `rows`.

    rest: the gradient error of all ops together that do not break the training alone. together: a group that breaks it
    together, where no single op was found that does.
    """

    def __init__(self, rows: dict[CallSite, Row], noise: Noise, errors: Sequence[float], h: float, run: Run) -> None:
        self._rows, self._noise, self._errors, self._h, self._run = rows, noise, errors, h, run
        self._trials: dict[CallSite, Trial] = {}
        self.rest = math.nan
        self.together: list[CallSite] = []

    def make(self, first: CallSite | None, batch: int | None, batches: int) -> None:
        """Make the runs.

        first, batch: where inf or NaN is first seen, if it is. batches: how many there are.
        """
        noise, runs = self._noise, max(batches, _RUNS)
        broken = first is not None or noise.error >= FELT
        if not broken and math.isnan(noise.noise):
            return
        known = {site: row for site, row in self._rows.items() if can_run_alone(site, row)}
        worst = max(range(len(self._errors)), key=self._errors.__getitem__) if batch is None else batch
        for site in _suspects(self._rows, known, runs, first, broken):
            order = self._batches_for(site, batches)
            trial = self._trials[site] = Trial(site, order)
            number = order[0] if batch is None else batch
            trial.add(number, self._run([site], number))
            runs -= 1
        if broken:
            alone = {site for site, trial in self._trials.items() if trial.error(noise) >= FELT}
            others = [site for site in known if site not in alone and not site.not_compared]
            runs -= self._search(others, worst, batches)
        self._repeat(runs)
        for site, trial in self._trials.items():
            self._rows[site] = trial.row(self._rows[site], noise)

    def _batches_for(self, site: CallSite, batches: int) -> list[int]:
        """Return all batches: first those in which the site, by its estimates, and the lists as a whole do most.

        An estimate for one batch is v . e, in which chance has a part; the lists as a whole are several sites.
        """
        if not self._errors:
            return list(range(batches))
        along = [each * each for each in projected(site, self._h)]
        looks = [a + b for a, b in zip(_shares(along), _shares(self._errors), strict=True)]
        return sorted(range(batches), key=lambda batch: -looks[batch])

    def _search(self, others: list[CallSite], batch: int, batches: int) -> int:
        """Run the others together, and find the single ops among them that break it, or a group; return the runs."""
        effects: dict[tuple[CallSite, ...], Effect] = {}

        def error(group: Sequence[CallSite]) -> float:
            key = tuple(group)
            if key not in effects:
                effects[key] = self._run(group, batch)
            return _in_noise(_squares(effects[key]), self._noise)

        self.rest = error(others) if others else 0.0
        if self.rest >= FELT:
            explained = any(trial.error(self._noise) >= FELT for trial in self._trials.values())
            parts = halved(others, lambda group: error(group) >= FELT)
            singles = [part[0] for part in parts if len(part) == 1 and tuple(part) in effects]
            for site in singles:
                self._trials[site] = trial = Trial(site, self._batches_for(site, batches))
                trial.add(batch, effects[site,])
            if singles:
                others = [site for site in others if site not in singles]
                self.rest = error(others) if others else 0.0
            elif not explained:
                self.together = min(parts, key=len, default=[])
        return len(effects)

    def _repeat(self, runs: int) -> None:
        """Make more runs, in turn, of what breaks the training or nearly does."""
        near = [trial for trial in self._trials.values() if trial.error(self._noise) >= FELT / 2]
        while runs > 0 and near:
            trial = near.pop(0)
            if trial.batches:
                trial.add(trial.batches[0], self._run([trial.site], trial.batches[0]))
                near.append(trial)
                runs -= 1


def can_run_alone(site: CallSite, row: Row) -> bool:
    """Whether a run of this site alone in low precision would tell anything."""
    return bool(row.error) and not site.not_compared and not row.raised


def _suspects(
    rows: Iterable[CallSite], known: Mapping[CallSite, Row], runs: int, first: CallSite | None, broken: bool
) -> list[CallSite]:
    """Return the sites to run alone: those that must be, then those that look worst, and that autograd does not see.

    rows: all sites. known: those that can run alone. first: where inf or NaN is first seen. broken: whether the lists
    as a whole break the training.
    """
    seen = {site: row.gradient_error for site, row in known.items() if site.differentiable}
    unseen = sorted((site for site in known if not site.differentiable), key=lambda site: -known[site].error)
    worst = [site for site, look in seen.items() if look >= (0 if broken else FELT) or (broken and math.isnan(look))]
    worst.sort(key=lambda site: (-seen[site] if seen[site] >= 0 else 0.0, -known[site].error))
    likely = [site for site in worst if seen[site] >= FELT]
    before = _before_decisions(rows, known) if broken else []
    in_turn = itertools.zip_longest(unseen, worst[len(likely) :])
    must = dict.fromkeys([*([first] if first in known else []), *before, *likely])
    found = list(must | dict.fromkeys(site for pair in in_turn for site in pair if site))
    # Of lists that break it, one run is kept for all others together.
    return found[: max(min(len(must), _ROWS), runs - 1) if broken else min(_ROWS, runs)]


def _before_decisions(deciding: Iterable[CallSite], known: Collection[CallSite]) -> list[CallSite]:
    """Return the sites that ran in low precision right before decisions that the lists have changed."""
    calls = {(number[0], call.order): site for site in known for number, call in site.calls.items() if call.is_low}
    order = sorted(calls)
    found: dict[CallSite, None] = {}
    for site in deciding:
        for batch, at in site.changed_at[:1]:
            earlier = [place for place in order if place[0] == batch and place[1] <= at]
            found |= dict.fromkeys(calls[place] for place in reversed(earlier[-_BEFORE:]))
    return list(found)[: _ROWS // 2]


def halved(group: Sequence[CallSite], breaks: Callable[[Sequence[CallSite]], bool]) -> list[list[CallSite]]:
    """Divide a group that breaks it together into parts that do: single sites, or groups of which neither half does."""
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


def _shares(values: Sequence[float]) -> list[float]:
    """Return each value as a share of the sum; where one is not finite, it has all of it."""
    whole = sum(values)
    if math.isfinite(whole):
        return [value / (whole or 1.0) for value in values]
    return [float(not math.isfinite(value)) for value in values]


def _squares(effect: Effect) -> float:
    """Return the squared norm of the change of the gradients; infinite where the run ended in inf or NaN."""
    change, gradients = effect
    return (square(gradients) if gradients else 0.0) if math.isfinite(change) else math.inf


def _in_noise(squares: float, noise: Noise) -> float:
    return math.inf if squares == math.inf else noise.in_noise(squares)
