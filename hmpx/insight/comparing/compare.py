"""`compare`: the runs in their order, and what is made of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hmpx import observation
from hmpx.insight.comparing import noise, trials
from hmpx.insight.comparing.backward import Backward
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.comparison import Comparison
from hmpx.insight.comparing.lists import lists_meant, rules_meant
from hmpx.insight.comparing.passes import Alone, Low, Mended, Shifted, Wide
from hmpx.insight.comparing.row import Row
from hmpx.insight.comparing.rows import mask_note, projected, row_of, sums
from hmpx.insight.comparing.sites import Pass, Sites
from hmpx.insight.comparing.subject import Loss, Subject
from hmpx.insight.stance import eager
from hmpx.insight.tensors import Tensor
from hmpx.ops.observing import unobserved
from hmpx.ops.policy import Policy
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
    results under the lists, and the errors of the ops. Where something looks broken, or runs without gradients, up to
    eight ops are then measured alone, each in the batches in which it looks worst: in all by as many runs as there are
    batches, or four.

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
        undo.enter_context(observation.observed(policy, kernels, sites, rules_meant(lists, recipe, model)))
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
        for number, batch in enumerate(self._subject.batches):
            self._compare(number, batch)
        rows = {site: row_of(site, self._noise, self._h) for site in self._sites.compared()}
        producer = self._producer()
        self._try_out(rows)
        first = None
        if producer is not None:
            first = rows[producer[0]] = self._explained(*producer, rows[producer[0]])
        exact, low = (sum(losses) / len(losses) for losses in zip(*self._losses, strict=True))
        scored = bool(self._subject.parameters)
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
        low, low_gradients = self._observed(Low(sites), subject.low, batch)
        exact, gradients = self._observed(Wide(sites), subject.wide, batch)
        if number == 0:
            self._check_same(exact, batch)
        if self._shifts:
            with unobserved():
                self._errors.append(self._noise.add(gradients, low_gradients))
            self._exact.append(gradients)
            sites.forget_results()
            shifted = Shifted(sites)
            self._observed(shifted, subject.shifted, batch, self._shifts[number % noise.DIRECTIONS], shifted.wanted)
        self._losses.append((exact, low))
        sites.end_batch()

    def _check_same(self, exact: float, batch: tuple) -> None:
        again, _ = self._observed(Wide(self._sites, compare=False), self._subject.wide, batch, False)
        self._subject.check_repeats(exact, again)

    def _try_out(self, rows: dict[Compared, Row]) -> None:
        """Put what runs of single ops say into the rows that need it."""
        if not self._shifts or self._noise.batches < 2:
            return
        tried = [
            trials.Trial(site, trials.worst_batches(projected(site, self._h), self._errors))
            for site in trials.suspects(rows, self._noise)
        ]
        trials.make(tried, rows, self._noise, self._alone)
        for trial in tried:
            rows[trial.site] = trial.row(rows[trial.site], self._noise)

    def _alone(self, site: Compared, number: int) -> tuple[float, list[Tensor]]:
        """What a site alone changes in a batch: the loss and the gradients."""
        self._sites.batch = number
        loss, gradients = self._observed(Alone(self._sites, {site}), self._subject.wide, self._subject.batches[number])
        with unobserved():
            errors = [low - exact for low, exact in zip(gradients, self._exact[number], strict=True)]
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
        locating = Backward(self._sites)
        self._observed(locating, self._subject.low, self._subject.batches[number])
        return locating.first

    def _explained(self, site: Compared, phase: str, number: int, row: Row) -> Row:
        """The row of a producer: whether FP32 there mends it, and what it has to do with a mask."""
        self._sites.batch = number
        loss, gradients = self._observed(Mended(self._sites, {site}), self._subject.low, self._subject.batches[number])
        mended = math.isfinite(loss) and math.isfinite(noise.square(gradients))
        wrong = max(site.accumulated.nonfinite, 1)
        return replace(row, phase=phase, mended=mended, nonfinite=wrong, note=mask_note(site))
