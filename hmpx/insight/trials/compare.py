"""`compare`: do these lists train as FP32 does, and if not, which ops must be in FP32?

1. Each batch runs in FP32 and under the lists. If the lists are healthy, the comparison ends here.
2. Else `Search` finds the largest part of the list names that is healthy while every other op is in FP32. The units
   that do not fit are suspects. Not all of them are to blame: an op that only rounds its inputs is a suspect, too.
3. The lists run with suspects in FP32. The fewest suspects that must be in FP32 are to blame. Step 2 is
   needed, too: an op in FP32 takes the unlisted ops behind it along, and so cures errors that it does not make. The
   last of these runs measures the advice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hmpx.insight.dispatch import OpWatch
from hmpx.insight.finding import in_a_line
from hmpx.insight.looks.nonfinite import Nonfinite
from hmpx.insight.notes import Notes
from hmpx.insight.report import grouped
from hmpx.insight.tensors import Tensor
from hmpx.insight.trials.calls import (
    Asked,
    BothWays,
    Compute,
    RunSite,
    by_site,
    compute_as_listed,
    compute_in_fp32,
    compute_in_low,
)
from hmpx.insight.trials.comparison import FELT, Comparison, Row, row_of, worst_first
from hmpx.insight.trials.runs import Difference, Effect, Progress, Runs, observed
from hmpx.insight.trials.search import PIECES, Search, largest
from hmpx.insight.trials.subject import Loss, Stopped, Subject, lists_meant, place_of, rules_meant
from hmpx.ops.policies.catalog import canonical
from hmpx.ops.policies.composition import callers
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import unobserved
from hmpx.recipes.recipe import Recipe

logger = logging.getLogger("hmpx")

_MOST = 40, 10  # runs of the search at most: so many, and so many more for each batch

Unit = frozenset[RunSite]


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
    all batches.

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
    subject = Subject(model, batches, loss, recipe)
    with subject.opened(), Progress("compare", progress) as counted:
        # An op that computes the loss changes the loss, and hardly a gradient: both are shown, and gradients decide.
        runs = Runs(subject, counted, loss_counts=False)
        with observed(policy, kernels, runs, rules_meant(lists, recipe, model)):
            return _Comparing(runs, counted, str(policy), scores).run()


class _Comparing:
    def __init__(self, runs: Runs, progress: Progress, policy: str, scores: bool) -> None:
        self._runs, self._progress, self._policy, self._scores = runs, progress, policy, scores
        self._numbers = [*range(len(runs.subject.batches))]  # of the batches; `run` puts the worst first
        self._changes = Difference(runs, len(self._numbers))
        self._low_losses: list[float] = []
        self._log_probs: list[Tensor] = []  # of each batch, how far the lists move them
        self._first_log_probs: Tensor | None = None  # in FP32, of the first batch
        self._measured: dict[tuple[Unit, tuple[int, ...]], Effect] = {}
        self._without: dict[Unit, Effect] = {}
        self._most = 0  # the number of runs after which the search ends

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
        names = grouped((site for site in sites if site.is_low), lambda site: site.op)
        self._most = self._progress.done + len(names) + _MOST[0] + _MOST[1] * len(self._numbers)
        self._progress.most = f" of at most {self._most}"
        self._numbers.sort(key=lambda number: -whole.by_batch[number])
        self._without[Unit()] = whole
        is_broken = first is not None or whole.felt >= FELT
        units = [frozenset(each) for each in names.values()]
        culprits, advised = self._blame(units) if is_broken and units else ([], Effect(math.nan, part_error=math.nan))
        is_cut_short = is_broken and self._is_spent
        runs.check_repeats()  # what has changed after the first check, such as a schedule in a module
        rows = {site: row_of([site]) for site in sites}
        if first is not None:
            rows[first] = replace(row_of([first]), phase=phase)
        self._move_log_probs(rows)
        raised = [row for row in rows.values() if row.raised]
        mean_loss = sum(runs.losses) / len(runs.losses)
        return Comparison(
            rows=tuple(rows.values()),
            broken=(*raised, *self._rows_to_blame(culprits)),
            advised=advised.gradient_error,
            advised_part=advised.part_error,
            gradient_error=whole.gradient_error,
            gradient_bias=whole.gradient_bias,
            part_error=whole.part_error,
            part=whole.part,
            loss=mean_loss,
            loss_change=sum(self._low_losses) / len(self._low_losses) - mean_loss,
            log_prob_change=float(torch.cat(self._log_probs).mean()) if self._log_probs else math.nan,
            first_nonfinite=None if first is None else rows[first],
            is_cut_short=is_cut_short,
            names=tuple(self._row(each, True, is_broken or self._scores) for each in names.values()),
            passes=self._progress.done,
            policy=self._policy,
        )

    @property
    def _is_spent(self) -> bool:
        return self._progress.done >= self._most

    def _compare(self, number: int) -> None:
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
        subject = self._runs.subject
        what = f"a gradient of batch {number}"
        if not math.isfinite(self._runs.losses[number]):
            what = f"the loss of batch {number}"
        said = f"FP32 itself is not finite: {what} has inf or NaN"
        if bad := subject.not_finite(subject.batches[number]):
            return f"{said}, and so {bad}. No list mends that"
        first, phase = self._first_nonfinite(number, compute_in_fp32, subject.wide)
        if first is None:
            return f"{said}, {phase or 'made by no op that hmpx sees'}. No list mends that"
        return f"{said}, first in the {phase} pass of {first}. No list mends that"

    def _first_nonfinite(self, number: int, compute: Compute, work: Callable) -> tuple[RunSite | None, str]:
        """Run a batch again; return the first site that makes inf or NaN of finite numbers, and in which pass.

        If the look for it raises, a warning says so, the site is None, and words on the error replace the pass.
        """
        look, trouble = Nonfinite(), list[str]()
        watch = OpWatch(Notes(), [look], trouble)
        watch.look_at(math.inf)
        try:
            self._runs.run(compute, work, number, "searching inf or NaN")
        finally:
            watch.close()
        found = look.first
        if found is None:
            raised = f"and the look for the op has raised {trouble[0]}" if trouble else ""
            if raised:
                logger.warning("hmpx: compare: a result is not finite, %s", raised)
            return None, raised
        place, ran = found.place, found.forward or found.op
        names = (canonical(ran.strip("_")), *callers(ran))
        here = [site for site in self._runs.sites if (site.where, site.module) == (place.where, place.module)]
        first = next((site for site in here if site.op in names), next(iter(here), None))
        first = first or RunSite(found.name, place.where or "?", place.module)  # its line calls backward()
        return first, "backward" if found.numbers["backward"] else "forward"

    def _first_wrong(self, whole: Effect) -> tuple[RunSite | None, str]:
        """Return the first site whose result is finite in FP32 and not under the lists, and in which pass that is."""
        wrong = [(site.wrong, site) for site in self._runs.sites if site.wrong is not None]
        if wrong:
            return min(wrong, key=lambda each: each[0])[1], "forward"
        for number, error in whole.by_batch.items():
            if math.isfinite(self._low_losses[number]) and error == math.inf:
                return self._first_nonfinite(number, compute_as_listed, self._runs.subject.low)
        return None, ""

    def _measure(self, unit: Unit, batches: Sequence[int], enough: float = math.inf) -> Effect:
        """Return how some batches change if these sites are in low precision and all else is in FP32."""
        key = unit, tuple(batches)
        if key not in self._measured:
            self._measured[key] = self._runs.effect(_low_in(unit), batches, "some alone", enough, wide=True)
        return self._measured[key]

    def _effect_without(self, wide: Unit) -> Effect:
        """Return the effect of the lists if these sites, and all sites that raise under the lists, are in FP32."""
        if wide not in self._without:
            compute = by_site(lambda site: compute_in_fp32 if site in wide or site.raised else Asked.plainly)
            self._without[wide] = self._runs.effect(compute, self._numbers, "searching", FELT)
        return self._without[wide]

    def _blame(self, names: list[Unit]) -> tuple[list[Unit], Effect]:
        """Return the units that must be in FP32, and what the lists do then. No units: FP32 does not help."""

        def measure(unit: Unit, batches: Sequence[int], enough: float = math.inf) -> Effect:
            return Effect(math.inf) if self._is_spent else self._measure(unit, batches, min(enough, FELT))

        search = Search(measure, self._numbers, FELT, Effect())
        every, kept = Unit().union(*names), search.run(names)
        suspects = search.left if self._effect_without(every - kept).felt < FELT else names
        if self._effect_without(Unit().union(*suspects)).felt >= FELT:
            return [], self._effect_without(every)
        order = sorted(suspects, key=lambda unit: (measure(unit, self._numbers[:1]).felt, *sorted(map(str, unit))))

        def may_stay(some: list[Unit]) -> bool:
            wide = Unit().union(*(unit for unit in order if unit not in some))
            return not self._is_spent and self._effect_without(wide).felt < FELT

        # Near the limit, more sites in FP32 may raise the error. Try the worst suspect alone first, for a small answer.
        _, left = largest(order, may_stay, lambda kept, rest: len(rest) - 1)
        return left, self._effect_without(Unit().union(*left))

    def _rows_to_blame(self, culprits: Sequence[Unit]) -> list[Row]:
        """Return a row for each name in each module, as a rule names them. The first rows say what each does alone."""
        blamed = Unit().union(*culprits)
        in_order = (site for site in self._runs.sites if site in blamed)  # the order of a set differs between processes
        units = grouped(in_order, lambda site: (site.op, site.module))
        rows = []
        for i, sites in enumerate(units.values()):
            if 1 < len(sites) <= PIECES and not self._is_spent:  # the worst line stands for all
                sites.sort(key=lambda site: -self._alone(Unit([site])).felt)
            rows.append(self._row(sites, False, i < PIECES))
        return sorted(rows, key=worst_first)

    def _alone(self, unit: Unit) -> Effect:
        return self._measure(unit, self._numbers[:1])

    def _row(self, sites: list[RunSite], is_op: bool, runs: bool) -> Row:
        """runs: whether to measure what the sites do alone."""
        row = row_of(sites, is_op)
        if not runs:
            return row
        effect = self._alone(frozenset(sites))
        figures = {name: getattr(effect, name) for name in ("gradient_error", "loss_change", "part_error", "part")}
        return replace(row, **figures)

    def _move_log_probs(self, rows: dict[RunSite, Row]) -> None:
        """Run each site alone in the first batch, forward only, if the loss returns log-probs; note how they change."""
        exact, subject = self._first_log_probs, self._runs.subject
        for one in [site for site in rows if exact is not None and site.is_low]:
            self._runs.run(_low_in(Unit([one])), subject.wide, 0, "log-probs", False)
            if (changed := subject.log_probs) is not None and exact is not None:
                with unobserved():
                    rows[one] = replace(rows[one], log_prob_change=float((changed - exact).abs().mean()))


def _low_in(unit: Unit) -> Compute:
    """Return what computes these sites in low precision and all else in FP32.

    An unlisted op runs in BF16 behind one in BF16. Its errors would be blamed on that one.
    """
    return by_site(lambda site: compute_in_low if site in unit else compute_in_fp32)
