"""`compare`: do these lists train as FP32 does, and if not, which ops must be in FP32?

1. Each batch runs in FP32 and under the lists. Where that is healthy, it is the answer.
2. Else each list name that ran in low precision runs so alone, in the worst batch.
3. The largest part of the names that is healthy while the rest is in FP32 is found; a name that is left out is divided
   by module. What is left out is suspect. This view alone would blame an op that only rounds what it is given.
4. The largest part of the suspects that may stay as the lists have it, while the others are in FP32, is found under the
   lists as they are, on all batches. This view alone would name cures that are no cause: an op in FP32 makes all
   unlisted ops behind it follow. What is left is to blame, and the last run has measured what the advice brings.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hmpx.insight import observed
from hmpx.insight.comparing.both_ways import BothWays, FirstNonfinite
from hmpx.insight.comparing.comparison import Comparison
from hmpx.insight.comparing.row import FELT, Row, row_of, worst_first
from hmpx.insight.reasons import in_a_line
from hmpx.insight.run_state import eager
from hmpx.insight.tensors import Tensor
from hmpx.insight.trials.calls import Asked, CallSite, Compute, as_listed, by_site, exactly, lowly
from hmpx.insight.trials.runs import Difference, Effect, Progress, Runs
from hmpx.insight.trials.search import PARTS, largest, parts_of
from hmpx.insight.trials.subject import Loss, Stopped, Subject, lists_meant, place_of, rules_meant
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import unobserved
from hmpx.recipes.recipe import Recipe

_ROUNDS = 3  # of the search for suspects, each in the batch that is worst then
_MOST = 40, 10  # runs of the search: in all, and for each batch

Unit = frozenset[CallSite]


def compare(
    model: torch.nn.Module,
    batches: Sequence[tuple],
    loss: Loss,
    *,
    lists: Policy | Recipe | Mapping[str, Any] | str | None = None,
    scores: bool = False,
    progress: bool = True,
) -> Comparison:
    """Compare the training under op lists with FP32, and say which ops must be in FP32.

    Each batch runs twice, forward and backward: in FP32, and under the lists. Where the gradients are too far off, ops
    are measured in further runs, until the least is found that must be in FP32; the lists with that have then run on
    all batches. The search ends after one run for each list name, and 40 and 10 for each batch.

    An op that raises under the lists runs in FP32, and the verdict names it. Where FP32 itself is not finite, the
    comparison stops there, and says so.

    The model is as it was afterwards: parameters, gradients, buffers, random number generators. Random ops draw the
    same numbers in all runs. Compiled functions run eagerly. The FP32 gradients of all batches are kept in memory.

    Args:
        model: in FP32; or in BF16 or FP16, and then its FP32 copy is what it is compared with.
        batches: a list of tuples or lists of positional arguments. Noise between batches needs two, four are better. A
            batch of one argument that is a list of tensors is written ``([...],)``.
        loss: called as ``loss(model, *batch)``, returns a scalar tensor; or that and a tensor of log-probs, whose
            change is then shown too, at the price of one more forward pass for each op.
        lists: a recipe, as for `prepare` (a name, a file, a dict of its keys; its rules for modules hold, too), or a
            policy. None: what is in force, else the default lists with FP32 weights.
        scores: run each list name alone even where the lists are healthy.
        progress: show on standard error how far it is; one line at the end where that is no terminal.

    Raises:
        HmpxError: something above does not fit; the loss in FP32 is another one when it is computed again.

    Example:
        >>> batches = [(torch.randn(8, 4),) for _ in range(2)]
        >>> def loss(model, x):
        ...     return model(x).square().mean()
        >>> found = hmpx.compare(model, batches, loss, lists={"opt_level": "O2"}, scores=True, progress=False)
        >>> found.is_broken, found.worst(1)[0].op, found.worst(1)[0].gradient_error < 0.1
        (False, 'linear', True)
    """
    policy, recipe, kernels = lists_meant(lists)
    subject, counted = Subject(model, batches, loss, recipe), Progress("compare", progress)
    runs = Runs(subject, counted, loss_counts=False)
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(subject.gradients_kept())
            undo.enter_context(eager())
            undo.enter_context(observed.observed(policy, kernels, runs, rules_meant(lists, recipe, model)))
            return _Comparing(runs, counted, str(policy), scores).run()
    finally:
        counted.end()


class _Comparing:
    """One comparison while it is made."""

    def __init__(self, runs: Runs, progress: Progress, policy: str, scores: bool) -> None:
        self._runs, self._progress, self._policy, self._scores = runs, progress, policy, scores
        self._numbers = [*range(len(runs.subject.batches))]  # of the batches; the worst comes to stand first
        self._changes = Difference(runs, len(self._numbers))
        self._low_losses: list[float] = []
        self._log_probs: list[Tensor] = []  # the absolute changes by the lists, by batch
        self._first_log_probs: Tensor | None = None  # in FP32, of the first batch
        self._alone: dict[tuple[Unit, int], Effect] = {}
        self._without: dict[Unit, Effect] = {}
        self._looks: dict[CallSite, float] = {}  # the error of the smallest part with a site that was run alone
        self._most = 0  # runs, after which the search ends

    def run(self) -> Comparison:
        runs = self._runs
        try:
            for number in self._numbers:
                self._compare(number)
        except Stopped as why:
            return Comparison((), stopped=str(why), passes=self._progress.done, policy=self._policy)
        runs.find_noise()
        whole = self._changes.effect()
        first, phase = self._first_wrong(whole)
        sites = [site for site in runs.sites if site.calls]
        names: dict[str, list[CallSite]] = {}
        for site in sites:
            if site.is_low:
                names.setdefault(site.op, []).append(site)
        self._most = self._progress.done + len(names) + _MOST[0] + _MOST[1] * len(self._numbers)
        self._progress.most = f" of at most {self._most}"
        self._numbers.sort(key=lambda number: -whole.by_batch[number])
        self._without[Unit()] = whole
        is_broken = first is not None or whole.gradient_error >= FELT
        units = [frozenset(each) for each in names.values()]
        culprits, advised = self._blame(units) if is_broken and units else ([], math.nan)
        is_cut_short = is_broken and self._is_spent
        rows = {site: row_of([site]) for site in sites}
        if first is not None:
            rows[first] = replace(rows[first], phase=phase)
        self._move_log_probs(rows)
        raised = [row for row in rows.values() if row.raised]
        mean_loss = sum(runs.losses) / len(runs.losses)
        return Comparison(
            rows=tuple(rows.values()),
            broken=(*raised, *self._rows_to_blame(culprits)),
            advised=advised,
            gradient_error=whole.gradient_error,
            gradient_bias=whole.gradient_bias,
            loss=mean_loss,
            loss_change=sum(self._low_losses) / len(self._low_losses) - mean_loss,
            log_prob_change=float(torch.cat(self._log_probs).mean()) if self._log_probs else math.nan,
            first_nonfinite=None if first is None else rows[first],
            is_cut_short=is_cut_short,
            names=tuple(self._measured(each, True, is_broken or self._scores) for each in names.values()),
            passes=self._progress.done,
            policy=self._policy,
        )

    @property
    def _is_spent(self) -> bool:
        return self._progress.done >= self._most

    def _compare(self, number: int) -> None:
        """Run one batch in FP32 and under the lists."""
        runs, both = self._runs, BothWays()
        if not runs.exact(number, both.exact):
            raise Stopped(self._not_finite(number))
        log_probs = runs.subject.log_probs
        if number == 0:
            self._first_log_probs = log_probs
            runs.check_repeats()
        try:
            loss, gradients = runs.run(both.listed, runs.subject.low, number, "under the lists")
        except Exception as error:
            said = f"under the lists the program raises {in_a_line(error)} at {place_of(error)}, and in FP32 it runs"
            raise Stopped(said) from error
        self._low_losses.append(loss)
        self._changes.add(number, loss, gradients)
        if log_probs is not None and runs.subject.log_probs is not None:
            with unobserved():
                self._log_probs.append((runs.subject.log_probs - log_probs).abs().flatten())

    def _not_finite(self, number: int) -> str:
        """Return the verdict on a batch whose loss or gradients are not finite in FP32."""
        subject = self._runs.subject
        what = f"a gradient of batch {number}"
        if not math.isfinite(self._runs.losses[number]):
            what = f"the loss of batch {number}"
        said = f"FP32 itself is not finite: {what} has inf or NaN"
        if bad := subject.not_finite(subject.batches[number]):
            return f"{said}, and so {bad}. No list mends that"
        first, phase = self._first_nonfinite(number, exactly, subject.wide)
        if first is None:
            return f"{said}, made by no op that hmpx sees. No list mends that"
        return f"{said}, first in the {phase} pass of {first}. No list mends that"

    def _first_nonfinite(self, number: int, compute: Compute, work: Callable) -> tuple[CallSite | None, str]:
        """Run a batch again; return the first site that makes inf or NaN of finite numbers, and in which pass."""
        search = FirstNonfinite(compute)
        self._runs.run(search, work, number, "searching inf or NaN")
        return (search.forward, "forward") if search.forward else (search.backward, "backward")

    def _first_wrong(self, whole: Effect) -> tuple[CallSite | None, str]:
        """Return the site where something first is not finite that is finite in FP32, and in which pass."""
        wrong = [(site.wrong, site) for site in self._runs.sites if site.wrong is not None]
        if wrong:
            return min(wrong, key=lambda each: each[0])[1], "forward"
        for number, error in whole.by_batch.items():
            if math.isfinite(self._low_losses[number]) and error == math.inf:
                return self._first_nonfinite(number, as_listed, self._runs.subject.low)
        return None, ""

    def _error_alone(self, unit: Unit, batch: int) -> float:
        """Return the error with these sites in low precision and all else in FP32, in one batch."""
        if (unit, batch) not in self._alone:
            self._alone[unit, batch] = self._runs.effect(_alone(unit), [batch], "some alone", wide=True)
            self._looks |= dict.fromkeys(unit, self._alone[unit, batch].gradient_error)
        return self._alone[unit, batch].gradient_error

    def _error_without(self, units: Collection[Unit]) -> float:
        """Return the error of the lists with these sites in FP32; of some batches, where it is too much there already.

        A site that raises under the lists is in FP32, too.
        """
        wide = Unit().union(*units)
        if wide not in self._without:
            compute = by_site(lambda site: exactly if site in wide or site.raised else Asked.plainly)
            self._without[wide] = self._runs.effect(compute, self._numbers, "searching", FELT)
        return self._without[wide].gradient_error

    def _blame(self, names: list[Unit]) -> tuple[list[Unit], float]:
        """Return the sites that must be in FP32, and the error of the lists then; none where that does not help."""
        batch, suspects = self._numbers[0], list[Unit]()
        for _ in range(_ROUNDS):
            known = Unit().union(*suspects)
            suspects += self._suspects([unit - known for unit in names if unit - known], batch)
            if self._error_without(suspects) < FELT or self._is_spent:
                break
            by_batch = self._without[Unit().union(*suspects)].by_batch
            batch = max(by_batch, key=lambda number: by_batch[number], default=batch)
        if self._error_without(suspects) >= FELT:
            suspects = names
            if self._error_without(names) >= FELT:
                return [], self._error_without(names)
        met = {site: number for number, site in enumerate(self._runs.sites)}
        order = sorted(
            suspects,
            key=lambda unit: (max(self._looks.get(site, 0.0) for site in unit), min(met[site] for site in unit)),
        )

        def may_stay(kept: list[Unit]) -> bool:
            return not self._is_spent and self._error_without([unit for unit in order if unit not in kept]) < FELT

        # Errors near the limit do not grow with the set: begin with the worst suspect alone, for a small answer.
        _, left = largest(order, may_stay, lambda kept, rest: len(rest) - 1)
        return left, self._error_without(left)

    def _suspects(self, units: Sequence[Unit], batch: int) -> list[Unit]:
        """Return what cannot be in low precision beside the units that can, while all else is in FP32."""
        kept = Unit()

        def left_of(units: Sequence[Unit]) -> list[Unit]:
            nonlocal kept
            order = sorted(units, key=lambda unit: self._error_alone(unit, batch))

            def holds(some: list[Unit]) -> bool:
                return not self._is_spent and self._error_alone(kept.union(*some), batch) < FELT

            fitting = sum(self._error_alone(unit, batch) < FELT for unit in order)
            some, left = largest(order, holds, lambda _, rest: fitting)
            kept = kept.union(*some)
            return left

        waiting, found = left_of(units), list[Unit]()
        while waiting:
            unit = waiting.pop()
            parts = [] if self._is_spent else parts_of(unit, lambda site: site.module)
            if len(parts) > 1 and any(self._error_alone(part, batch) >= FELT for part in parts):
                waiting += left_of(parts)
            else:  # of one module; or of many, whose errors only add up
                found.append(unit)
        return found

    def _rows_to_blame(self, culprits: Sequence[Unit]) -> list[Row]:
        """Return a row for each name in each module, as rules say it; the first of them with what each does alone."""
        units: dict[tuple[str, str], list[CallSite]] = {}
        blamed = Unit().union(*culprits)
        met = [site for site in self._runs.sites if site in blamed]  # a set has another order in each process
        for site in sorted(met, key=lambda site: -self._looks.get(site, 0.0)):
            units.setdefault((site.op, site.module), []).append(site)
        rows = []
        for i, sites in enumerate(units.values()):
            if 1 < len(sites) <= PARTS and not self._is_spent:  # the worst line stands for all
                sites.sort(key=lambda site: -self._error_alone(Unit([site]), self._numbers[0]))
            rows.append(self._measured(sites, False, i < PARTS))
        return sorted(rows, key=worst_first)

    def _measured(self, sites: list[CallSite], is_op: bool, runs: bool) -> Row:
        """Return the row of sites. runs: whether to run them alone, for what they do."""
        row, unit, batch = row_of(sites, is_op), frozenset(sites), self._numbers[0]
        if not runs:
            return row
        error = self._error_alone(unit, batch)
        return replace(row, gradient_error=error, loss_change=self._alone[unit, batch].loss_change)

    def _move_log_probs(self, rows: dict[CallSite, Row]) -> None:
        """Run each site alone in the first batch, forward only, if the loss returns log-probs; note how they change."""
        exact, subject = self._first_log_probs, self._runs.subject
        for one in [site for site in rows if exact is not None and site.is_low]:
            self._runs.run(_alone(Unit([one])), subject.wide, 0, "log-probs", False)
            if (changed := subject.log_probs) is not None and exact is not None:
                with unobserved():
                    rows[one] = replace(rows[one], log_prob_change=float((changed - exact).abs().mean()))


def _alone(unit: Unit) -> Compute:
    """Return what computes these sites in low precision and all else in FP32."""
    return by_site(lambda site: lowly if site in unit else exactly)
