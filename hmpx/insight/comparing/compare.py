"""`compare`: makes the runs in their order, and the rows from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.comparing import noise, trials
from hmpx.insight.comparing.backward import Backward
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.comparison import Comparison
from hmpx.insight.comparing.fp32_passes import Alone, Finite, Shifted, Wide
from hmpx.insight.comparing.lists import lists_meant, rules_meant
from hmpx.insight.comparing.low_pass import Low
from hmpx.insight.comparing.row import FELT, Row, mask_note, projected, row_of, sums
from hmpx.insight.comparing.sites import Pass, Sites
from hmpx.insight.comparing.subject import Loss, Stopped, Subject, place_of
from hmpx.insight.reasons import in_a_line
from hmpx.insight.stance import eager
from hmpx.insight.tensors import Tensor
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import unobserved
from hmpx.recipes.recipe import Recipe


def compare(
    model: torch.nn.Module,
    batches: Sequence[tuple],
    loss: Loss | None = None,
    *,
    lists: Policy | Recipe | Mapping[str, Any] | str | None = None,
) -> Comparison:
    """Run each op beside itself in FP32, and say what its error does to the loss and to the gradients.

    Each batch is run three times, forward and backward: under the lists; in FP32, where each op is also computed alone
    as under the lists; and in FP32 again at slightly shifted weights. That takes two more sets of activations: the
    results under the lists, and the errors of the ops. Where something looks broken, or runs without gradients, ops are
    then measured alone, each in the batches in which it looks worst: in all by as many runs as there are batches, or
    four. Where the others still break it together, they are halved until single ops are found, in some ten runs more.

    An op that raises under the lists runs in FP32, and the verdict names it. Where FP32 itself is not finite, the
    comparison stops there, and says so.

    The model is as it was afterwards: parameters, gradients, buffers, random number generators. Random ops draw the
    same numbers in all runs. Compiled functions run eagerly.

    Args:
        model: in FP32; or in BF16 or FP16, and then its FP32 copy is what it is compared with.
        batches: a list of tuples or lists of positional arguments. Noise between batches needs two, four are better. A
            batch of one argument that is a list of tensors is written ``([...],)``.
        loss: called as ``loss(model, *batch)``, returns a scalar tensor. None: only results of ``model(*batch)`` are
            compared.
        lists: a recipe, as for `prepare` (a name, a file, a dict of its keys; its rules for modules hold, too), or a
            policy. None: what is in force, else the default lists with FP32 weights.

    Raises:
        HmpxError: something above does not fit; the loss in FP32 is another one when it is computed again.

    Example:
        >>> batches = [(torch.randn(8, 4),) for _ in range(2)]
        >>> found = hmpx.compare(model, batches, lambda model, x: model(x).square().mean(), lists={"opt_level": "O2"})
        >>> found.worst(1)[0].op, found.worst(1)[0].error < 0.01
        ('linear', True)
    """
    policy, recipe, kernels = lists_meant(lists)
    subject = Subject(model, batches, loss, recipe)
    sites = Sites()
    with contextlib.ExitStack() as undo:
        undo.enter_context(subject.gradients_kept())
        undo.enter_context(eager())
        undo.enter_context(observed.observed(policy, kernels, sites, rules_meant(lists, recipe, model)))
        return _Comparing(subject, sites, policy).run()


class _Comparing:
    """One comparison while it is made."""

    def __init__(self, subject: Subject, sites: Sites, policy: Policy) -> None:
        self._subject, self._sites, self._policy = subject, sites, policy
        self._noise = noise.Noise()
        self._h = noise.step_size(subject.parameters) if subject.parameters else 0.0
        self._shifts = noise.shifts(subject.parameters, self._h) if subject.parameters else []
        self._losses: list[tuple[float, float]] = []  # in FP32, and under the lists
        self._exact: list[list[Tensor]] = []  # FP32 gradients, by batch
        self._errors: list[float] = []  # squared, of the gradients under the lists, by batch
        self._passes = 0

    def run(self) -> Comparison:
        try:
            for number, batch in enumerate(self._subject.batches):
                self._compare(number, batch)
        except Stopped as why:
            return self._found({}, None, stopped=str(why))
        rows = {site: row_of(site, self._noise, self._h) for site in self._sites.compared()}
        producer = self._producer()
        if producer is not None:
            site, phase, _ = producer
            wrong = max(site.accumulated.nonfinite, 1)
            note = mask_note(site) or rows[site].note
            rows[site] = replace(rows[site], phase=phase, nonfinite=wrong, note=note)
        rest, together = self._try_out(rows, producer)
        first = None if producer is None else rows[producer[0]]
        return self._found(rows, first, rest=rest, together=tuple(rows[site] for site in together))

    def _found(self, rows: dict[Compared, Row], first: Row | None, **more: Any) -> Comparison:
        scored = bool(self._subject.parameters) and bool(rows)
        exact, low = (sum(losses) / len(losses) for losses in zip(*self._losses, strict=True)) if scored else (0.0, 0.0)
        return Comparison(
            rows=tuple(rows.values()),
            gradient_error=self._noise.error if scored else math.nan,
            gradient_bias=self._noise.bias if scored else math.nan,
            loss=exact if scored else math.nan,
            loss_change=low - exact if scored else math.nan,
            first_nonfinite=first,
            passes=self._passes,
            policy=str(self._policy),
            _ops=sums(rows, lambda site: Row(site.op), self._noise, self._h),
            _modules=sums(rows, lambda site: Row("", module=site.module), self._noise, self._h),
            **more,
        )

    def _observed(self, now: Pass | None, run: Callable[..., Any], *args: Any) -> Any:
        """A run of the model that one pass observes."""
        self._sites.now = now
        self._passes += 1
        try:
            return run(*args)
        finally:
            self._sites.now = None

    def _compare(self, number: int, batch: tuple) -> None:
        """The runs of one batch."""
        sites, subject = self._sites, self._subject
        sites.begin_batch(number)
        low, low_gradients = self._low(batch)
        exact, gradients = self._observed(Wide(sites), subject.wide, batch)
        if not math.isfinite(exact) or (gradients and not math.isfinite(noise.square(gradients))):
            raise Stopped(self._not_finite(number, batch, exact))
        if number == 0:
            self._check_same(exact, batch)
        if self._shifts:
            with unobserved():
                self._errors.append(self._noise.add(gradients, low_gradients))
            self._exact.append(gradients)
            sites.forget_results()
            self._observed(Shifted(sites), subject.shifted, batch, self._shifts[number % noise.DIRECTIONS])
        self._losses.append((exact, low))
        sites.end_batch()

    def _low(self, batch: tuple) -> tuple[float, list[Tensor]]:
        """The run under the lists."""
        try:
            return self._observed(Low(self._sites), self._subject.low, batch)
        except HmpxError:
            raise
        except Exception as error:
            said = f"under the lists the program raises {in_a_line(error)} at {place_of(error)}, and in FP32 it runs"
        self._observed(Wide(self._sites, compare=False), self._subject.wide, batch)  # raises if lists do not matter
        raise Stopped(said)

    def _not_finite(self, number: int, batch: tuple, exact: float) -> str:
        """The verdict on a batch whose loss or gradients are not finite in FP32."""
        made, run = Finite(self._sites), self._subject.wide
        what = f"the loss of batch {number}" if not math.isfinite(exact) else f"a gradient of batch {number}"
        if self._subject.loss is None:
            what = f"the result for batch {number}"
        said = f"FP32 itself is not finite: {what} has inf or NaN"
        if bad := self._subject.not_finite(batch):
            return f"{said}, and so {bad}. No list mends that"
        self._observed(made, run, batch)
        first, phase = made.first, "forward"
        if first is None and self._shifts:
            back = Backward(Wide(self._sites, compare=False))
            self._observed(back, run, batch)
            first, phase = back.first, "backward"
        if first is None:
            return f"{said}, made by no op that hmpx sees. No list mends that"
        inside = f" in {first.module}" if first.module else ""
        return f"{said}, first in the {phase} pass of {first.op}{inside}, {first.where}. No list mends that"

    def _check_same(self, exact: float, batch: tuple) -> None:
        again, _ = self._observed(Wide(self._sites, compare=False), self._subject.wide, batch, False)
        self._subject.check_repeats(exact, again)

    def _try_out(
        self, rows: dict[Compared, Row], producer: tuple[Compared, str, int] | None
    ) -> tuple[float, list[Compared]]:
        """Run single ops alone, and put the results into the rows that need them.

        Returns what all others do together, and a group that breaks it together where no single op was found.
        """
        measure, found = self._noise, math.nan
        broken = producer is not None or measure.error >= FELT
        if not broken and math.isnan(measure.noise):
            return found, []
        first, batch = (producer[0], producer[2]) if producer else (None, None)
        if batch is None:
            batch = max(range(len(self._errors)), key=self._errors.__getitem__)
        tried = [
            trials.Trial(site, self._batches_for(site, batch if producer else None))
            for site in trials.suspects(rows, measure, first, broken)
        ]
        runs, before = trials.runs_of(measure), self._passes
        for trial in tried[: None if broken else runs]:
            trial.add(trial.batches.pop(0), self._alone)
        together: list[Compared] = []
        if broken:
            alone = {trial.site for trial in tried if trial.error(measure) >= FELT}
            others = [s for s, row in rows.items() if s not in alone and trials.can_run_alone(s, row)]
            found, singles, together = self._search(others, batch, bool(alone))
            for site, effect in singles.items():
                tried = [trial for trial in tried if trial.site is not site]
                tried.append(trials.Trial(site, [b for b in self._batches_for(site, None) if b != batch]))
                tried[-1].add(batch, lambda *_, effect=effect: effect)
        if not math.isnan(measure.noise):
            trials.repeat(tried, rows, measure, self._alone, runs - (self._passes - before))
        for trial in tried:
            rows[trial.site] = trial.row(rows[trial.site], measure)
        return found, together

    def _batches_for(self, site: Compared, first: int | None) -> list[int]:
        """Batches for the runs of a site: those in which it looks worst first, but for one that is to be first."""
        if not self._shifts:
            order = list(range(len(self._subject.batches)))
        else:
            order = trials.worst_batches(projected(site, self._h), self._errors)
        return order if first is None else sorted(order, key=lambda batch: batch != first)

    def _search(
        self, others: list[Compared], batch: int, explained: bool
    ) -> tuple[float, dict[Compared, trials.Effect], list[Compared]]:
        """What the others do together in a batch; the single ops among them that break it; a group that does, or none.

        explained: whether there are others that break it alone.
        """
        effects: dict[Compared, trials.Effect] = {}
        known: dict[frozenset[Compared], float] = {}

        def harm(group: Sequence[Compared]) -> float:
            key = frozenset(group)
            if key not in known:
                effect = self._alone(group, batch)
                known[key] = trials.in_noise(effect, self._noise)
                if len(group) == 1:
                    effects[group[0]] = effect
            return known[key]

        singles: dict[Compared, trials.Effect] = {}
        while True:
            together = harm(others) if others else 0.0
            if not together >= FELT:
                return together, singles, []
            parts = trials.halved(others, lambda group: harm(group) >= FELT)
            found = [part[0] for part in parts if len(part) == 1 and part[0] in effects]
            if not found:
                return together, singles, [] if explained or singles else min(parts, key=len, default=[])
            singles |= {site: effects[site] for site in found}
            others = [site for site in others if site not in singles]

    def _alone(self, chosen: Collection[Compared], number: int) -> trials.Effect:
        """What some sites alone change in a batch: the loss and the gradients."""
        self._sites.batch = number
        low = Alone(self._sites, set(chosen))
        loss, gradients = self._observed(low, self._subject.wide, self._subject.batches[number])
        with unobserved():
            exact = self._exact[number] if self._exact else []
            errors = [low - full for low, full in zip(gradients, exact, strict=True)]
        if self._subject.loss is None and loss != self._losses[number][0]:
            return math.nan, errors
        return loss - self._losses[number][0], errors

    def _producer(self) -> tuple[Compared, str, int] | None:
        """The site where something first is not finite that is finite in FP32; the pass, and the batch."""
        wrong = [(site.first_wrong, site) for site in self._sites.compared() if site.first_wrong is not None]
        if wrong:
            (batch, _), site = min(wrong, key=lambda each: each[0])
            return site, "forward", batch
        for number, (exact, low) in enumerate(self._losses):
            if self._shifts and math.isfinite(exact) and math.isfinite(low):
                found = self._backward(number)
                if found is not None:
                    return found, "backward", number
        return None

    def _backward(self, number: int) -> Compared | None:
        """The site whose backward first makes something of a finite gradient that is not finite."""
        if not self._noise.is_wrong(number):
            return None
        self._sites.batch = number
        locating = Backward(Low(self._sites))
        self._observed(locating, self._subject.low, self._subject.batches[number])
        return locating.first
