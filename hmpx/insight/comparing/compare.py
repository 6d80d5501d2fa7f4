"""`compare`: the runs in their order, and the rows that come of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.comparing import noise
from hmpx.insight.comparing.calls import CallSite, Pass, Sites
from hmpx.insight.comparing.comparison import Comparison
from hmpx.insight.comparing.fp32_passes import AdvisedPass, AlonePass, ComparingPass, Fp32Pass, ShiftedPass
from hmpx.insight.comparing.listed_pass import FirstNonfinite, ListedPass
from hmpx.insight.comparing.row import FELT, Row, mask_note, row_of, sums
from hmpx.insight.comparing.subject import Loss, Stopped, Subject, lists_meant, place_of, rules_meant
from hmpx.insight.comparing.trials import Effect, Trials, can_run_alone
from hmpx.insight.reasons import in_a_line
from hmpx.insight.run_state import eager
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.trials.search import largest
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
        loss: called as ``loss(model, *batch)``, returns a scalar tensor; or that and a tensor of log-probs, whose
            change is then shown too, at the price of one more forward pass for each op. None: only results of
            ``model(*batch)`` are compared.
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
        self._log_probs: list[Tensor] = []  # the absolute changes by the lists, by batch
        self._first_log_probs: Tensor | None = None  # in FP32, of the first batch
        self._passes = 0

    def run(self) -> Comparison:
        try:
            for number, batch in enumerate(self._subject.batches):
                self._compare(number, batch)
        except Stopped as why:
            return self._found({}, None, stopped=str(why))
        rows = {site: row_of(site, self._noise, self._h) for site in self._sites.compared()}
        first, phase, seen_in = self._first_wrong()
        if first is not None:
            wrong, note = max(first.accumulated.nonfinite, 1), mask_note(first) or rows[first].note
            rows[first] = replace(rows[first], phase=phase, nonfinite=wrong, note=note)
        trials = Trials(rows, self._noise, self._errors, self._h, self._alone)
        trials.make(first, seen_in, len(self._subject.batches))
        wide, advised = self._advised(rows, first is not None or self._noise.error >= FELT)
        self._move_log_probs(rows)
        together = tuple(rows[site] for site in trials.together)
        advice = tuple(rows[site] for site in wide)
        more: dict[str, Any] = {"rest": trials.rest, "together": together, "advice": advice, "advised": advised}
        return self._found(rows, None if first is None else rows[first], **more)

    def _advised(self, rows: Mapping[CallSite, Row], is_broken: bool) -> tuple[Collection[CallSite], float]:
        """Return the sites that are to be in FP32, and the gradient error of the lists then, in all batches.

        These are the sites that break it alone, with those of the same name in the same module, as lists and rules name
        them. Where that is not enough, further ones are added. No sites: with all of them in FP32 it is not enough.
        """
        if not is_broken or not self._exact or math.isnan(self._noise.noise):
            return (), math.nan
        units: dict[tuple[str, str], list[CallSite]] = {}
        for site in rows:
            if any(LOW & {*call.given, *call.dtypes} or call.is_low for call in site.calls.values()):
                units.setdefault((site.op, site.module), []).append(site)
        known: dict[frozenset, float] = {}

        def error(wide: Collection[tuple[str, str]]) -> float:
            key = frozenset(wide)
            if key not in known:
                known[key] = self._error_of_lists({site for unit in key for site in units[unit]})
            return known[key]

        blamed = [unit for unit in units if any(rows[site].is_broken for site in units[unit])]
        others = [unit for unit in units if unit not in blamed]
        others.sort(key=lambda unit: max(_look(rows[site]) for site in units[unit]))
        if error(blamed) >= FELT:
            if error(units) >= FELT:
                return (), error(units)
            _, more = largest(
                others,
                lambda kept: error([*blamed, *(unit for unit in others if unit not in kept)]) < FELT,
                lambda kept, rest: len(rest) - 1,
            )
            blamed += more
        return [site for unit in blamed for site in units[unit]], error(blamed)

    def _error_of_lists(self, wide: Collection[CallSite]) -> float:
        """Return the gradient error of the lists with some sites in FP32; infinite where the program raises."""
        squares = 0.0
        for number, batch in enumerate(self._subject.batches):
            self._sites.batch = number
            try:
                loss, gradients = self._observed(AdvisedPass(self._sites, wide), self._subject.low, batch)
            except Exception as error:
                in_a_line(error)  # which raises where the memory is at an end
                return math.inf
            with unobserved():
                errors = [low - exact for low, exact in zip(gradients, self._exact[number], strict=True)]
                squares += noise.square(errors) if math.isfinite(loss) else math.inf
        return self._noise.in_noise(squares / len(self._exact)) if math.isfinite(squares) else math.inf

    def _found(self, rows: dict[CallSite, Row], first: Row | None, **more: Any) -> Comparison:
        scored = bool(self._subject.parameters) and bool(rows)
        exact, low = (sum(losses) / len(losses) for losses in zip(*self._losses, strict=True)) if scored else (0.0, 0.0)
        return Comparison(
            rows=tuple(rows.values()),
            gradient_error=self._noise.error if scored else math.nan,
            gradient_bias=self._noise.bias if scored else math.nan,
            loss=exact if scored else math.nan,
            loss_change=low - exact if scored else math.nan,
            first_nonfinite=first,
            log_prob_change=float(torch.cat(self._log_probs).mean()) if self._log_probs else math.nan,
            passes=self._passes,
            policy=str(self._policy),
            _ops=sums(rows, "op", self._noise, self._h),
            _modules=sums(rows, "module", self._noise, self._h),
            **more,
        )

    def _observed(self, now: Pass, run: Callable[..., Any], *args: Any) -> Any:
        """Run the model under a pass."""
        self._sites.now = now
        self._passes += 1
        try:
            return run(*args)
        finally:
            self._sites.now = None

    def _compare(self, number: int, batch: tuple) -> None:
        """Make the runs of one batch."""
        sites, subject = self._sites, self._subject
        sites.begin_batch(number)
        (low, low_gradients), low_log_probs = self._low(batch), subject.log_probs
        (exact, gradients), log_probs = self._observed(ComparingPass(sites), subject.wide, batch), subject.log_probs
        if not math.isfinite(exact) or (gradients and not math.isfinite(noise.square(gradients))):
            raise Stopped(self._not_finite(number, batch, exact))
        if log_probs is not None and low_log_probs is not None:
            with unobserved():
                self._log_probs.append((low_log_probs - log_probs).abs().flatten())
        if number == 0:
            self._first_log_probs = log_probs
            subject.check_repeats(exact, self._observed(Fp32Pass(sites), subject.wide, batch, False)[0])
        if self._shifts:
            with unobserved():
                self._errors.append(self._noise.add(gradients, low_gradients))
            self._exact.append(gradients)
            sites.forget_results()
            self._observed(ShiftedPass(sites), subject.shifted, batch, self._shifts[number % noise.DIRECTIONS])
        self._losses.append((exact, low))
        sites.end_batch()

    def _low(self, batch: tuple) -> tuple[float, list[Tensor]]:
        """Make the run under the lists."""
        try:
            return self._observed(ListedPass(self._sites), self._subject.low, batch)
        except HmpxError:
            raise
        except Exception as error:
            said = f"under the lists the program raises {in_a_line(error)} at {place_of(error)}, and in FP32 it runs"
        self._observed(Fp32Pass(self._sites), self._subject.wide, batch)  # raises if lists do not matter
        raise Stopped(said)

    def _not_finite(self, number: int, batch: tuple, exact: float) -> str:
        """Return the verdict on a batch whose loss or gradients are not finite in FP32."""
        what = f"the loss of batch {number}" if not math.isfinite(exact) else f"a gradient of batch {number}"
        if self._subject.loss is None:
            what = f"the result for batch {number}"
        said = f"FP32 itself is not finite: {what} has inf or NaN"
        if bad := self._subject.not_finite(batch):
            return f"{said}, and so {bad}. No list mends that"
        search = FirstNonfinite(Fp32Pass(self._sites))
        self._observed(search, self._subject.wide, batch)
        first, phase = search.forward or search.backward, "forward" if search.forward else "backward"
        if first is None:
            return f"{said}, made by no op that hmpx sees. No list mends that"
        inside = f" in {first.module}" if first.module else ""
        return f"{said}, first in the {phase} pass of {first.op}{inside}, {first.where}. No list mends that"

    def _first_wrong(self) -> tuple[CallSite | None, str, int | None]:
        """Return the site where something first is not finite that is finite in FP32; the pass, and the batch."""
        wrong = [(site.first_wrong, site) for site in self._sites.compared() if site.first_wrong is not None]
        if wrong:
            (batch, _), site = min(wrong, key=lambda each: each[0])
            return site, "forward", batch
        for number, error in enumerate(self._errors):
            if math.isfinite(self._losses[number][1]) and not math.isfinite(error):
                self._sites.batch = number
                search = FirstNonfinite(ListedPass(self._sites))
                self._observed(search, self._subject.low, self._subject.batches[number])
                if search.backward is not None:
                    return search.backward, "backward", number
        return None, "", None

    def _move_log_probs(self, rows: dict[CallSite, Row]) -> None:
        """Run each site alone in the first batch, forward only, if the loss returns log-probs; note how they change."""
        exact, self._sites.batch = self._first_log_probs, 0
        for site, row in rows.items():
            if exact is not None and can_run_alone(site, row):
                alone = AlonePass(self._sites, {site})
                self._observed(alone, self._subject.wide, self._subject.batches[0], False)
                if (changed := self._subject.log_probs) is not None and not site.not_compared:
                    with unobserved():
                        rows[site] = replace(row, log_prob_change=float((changed - exact).abs().mean()))

    def _alone(self, chosen: Collection[CallSite], number: int) -> Effect:
        """Run some sites alone in a batch; return what that changes in the loss and the gradients."""
        self._sites.batch = number
        low = AlonePass(self._sites, set(chosen))
        loss, gradients = self._observed(low, self._subject.wide, self._subject.batches[number])
        change = loss - self._losses[number][0]
        if self._subject.loss is None:
            return math.nan if change else 0.0, []
        with unobserved():
            return change, [low - exact for low, exact in zip(gradients, self._exact[number], strict=True)]


def _look(row: Row) -> float:
    """Return how bad a row looks; one of which nothing is known looks worst."""
    return math.inf if row.note or math.isnan(row.gradient_error) else row.gradient_error
