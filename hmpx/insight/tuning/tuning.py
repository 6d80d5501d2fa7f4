"""One tuning: scores, a choice, its verification and repair."""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hmpx import observation
from hmpx.errors import HmpxError
from hmpx.insight.comparing import noise
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.choosing import choose
from hmpx.insight.tuning.dividing import Division, as_listed, spoiled
from hmpx.insight.tuning.fingerprint import fingerprint, fingerprint_of
from hmpx.insight.tuning.held_out import Divided, Exact, HeldOut
from hmpx.insight.tuning.measured import Measured
from hmpx.insight.tuning.problem import Chosen, Effect, Problem, Scale
from hmpx.insight.tuning.progress import Progress
from hmpx.insight.tuning.raising import check_finite
from hmpx.insight.tuning.repairing import Budget, Repair
from hmpx.insight.tuning.result import Asked, Outcome, known, result
from hmpx.insight.tuning.scoring import Kept, Rescoring, Scoring
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import LOW, WIDE, Measuring, cast_seconds, free
from hmpx.ops.catalog import catalog
from hmpx.ops.policy import Policy, Rule
from hmpx.recipes.module_patterns import module_names

_DIRECTIONS = 3  # along which the weights are shifted, for each batch
# How far: by what BF16 rounds. A kink (of relu) that a rounding steps over adds to its error as often as a shift of
# that size steps over it; a smaller shift steps over fewer, makes more of each, and its squares come out too large.
_SHIFT = 2.0**-9


@functools.cache
def decidable() -> frozenset[str]:
    """The names that are put into a list: of ops that make new values."""
    return frozenset(name for name, op in catalog().items() if op.computes and not op.view and name[0] != "_")


class Tuning:
    """One tuning while it is made."""

    def __init__(
        self,
        subject: Subject,
        scored: list[tuple],
        verified: list[tuple],
        asked: Asked,
        resume: str | os.PathLike[str] | None,
    ) -> None:
        self._subject, self._batches, self._asked, self._resume = subject, scored, asked, resume
        self._sites = Sites()
        self._held_out = HeldOut(subject, self._sites, verified)
        self._measured = Measured(self._about())
        self._steps = 0
        self._progress = Progress(len(scored) * (1 + _DIRECTIONS) + 8 * len(verified), asked.progress)

    def run(self) -> Tuned:
        if self._resume is not None:
            self._measured = Measured.load(self._resume, self._measured.about)
        try:
            with self._measured.kept_when_interrupted(self._resume):
                with observation.observed(self._everything(), self._asked.kernels, self._sites):
                    self._score()
                    outcome = self._chosen()
                return result(outcome, self._asked, self._sites, self._held_out)
        finally:
            self._progress.end()

    def _about(self) -> dict[str, Any]:
        """What makes two tunings the same."""
        model, recipe = self._subject.model, self._asked.recipe
        parameters = {name: [*p.shape] for name, p in model.named_parameters()}
        return {
            "torch": str(torch.__version__),
            "parameters": str(parameters),
            "batches": len(self._batches),
            "batches held out": len(self._held_out.batches),
            "objective": self._asked.objective,
            "seed": self._asked.seed,
            "kernels": self._asked.kernels,
            "parameter_dtype": None if recipe is None else str(recipe.parameter_dtype),
            "the model": fingerprint([[*model.parameters()], [*model.buffers()]]),
            "the batches": fingerprint(self._batches),
            "held_out": fingerprint(self._held_out.batches),
            "the loss": fingerprint_of(self._subject.loss),
            "the lists": f"{self._asked.base}{recipe or ''}",
        }

    def _everything(self) -> Policy:
        """Every op that can be decided about in the bf16 list; a user's own functions as they are listed."""
        own = self._asked.base.user_functions()
        low = [name for name, rule in own.items() if rule is Rule.BF16]
        return Policy(
            bf16=(*sorted(decidable()), *low), fp32=tuple(name for name, rule in own.items() if rule is Rule.FP32)
        )

    def _keep(self) -> None:
        if self._resume is not None:
            self._measured.save(self._resume)

    def _score(self) -> None:
        parameters, measured = self._subject.parameters, self._measured
        shifts = noise.shifts(parameters, noise.step_size(parameters, _SHIFT), _DIRECTIONS, self._asked.seed)
        self._check_repeats()
        for number in range(len(measured.losses), len(self._batches)):
            self._score_batch(number, shifts)
            self._keep()
        if not len(measured.found):
            raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
        if math.isnan(measured.noise.noise):
            raise HmpxError("tune: the batches are all alike, so there is no noise between them; give some that differ")

    def _scale(self) -> Scale:
        """The noise of losses is that between all batches: two that are held out may happen to have nearly one loss."""
        measured, held_out = self._measured, self._held_out
        held_out.loss_noise = statistics.stdev([*measured.losses, *held_out.losses]) or math.inf
        h = noise.step_size(self._subject.parameters, _SHIFT)
        return Scale(len(self._batches), _DIRECTIONS, h, measured.noise.noise, held_out.loss_noise)

    def _check_repeats(self) -> None:
        """The loss of the first batch is the same each time; on resuming, the same as it was then."""

        def exact() -> float:
            return self._run(Exact({}), partial(self._subject.wide, self._batches[0], False))[0]

        first = exact()
        check_finite(first, (), "batch 0")
        self._subject.check_repeats(self._measured.losses[0] if self._measured.losses else exact(), first)

    def _score_batch(self, number: int, shifts: list) -> None:
        """The passes over one batch; kept together or, when interrupted, not at all."""
        measured, batch = self._measured, self._batches[number]
        self._sites.begin_batch(number)
        kept = Kept()
        measuring = Measuring(self._asked.objective)
        scoring = Scoring(measured.found, kept, number, decidable(), measuring.look if number == 0 else None)
        exact, gradients = self._run(scoring, partial(self._subject.wide, batch, also=scoring.inputs))
        check_finite(exact, gradients, f"batch {number}")
        runs: list[Scoring | Rescoring] = [scoring]
        for direction, shift in enumerate(shifts, 1):
            rescoring = Rescoring(measured.found, kept, number, direction)
            self._run(rescoring, partial(self._subject.shifted, batch, shift, rescoring.wanted, rescoring.inputs))
            runs.append(rescoring)
        for each in runs:
            each.settle()
        measured.noise.add(gradients, gradients)
        measured.losses.append(exact)

    def _run(self, now: Any, work: Callable[[], Any]) -> Any:
        self._sites.now = now
        self._steps += 1
        try:
            return work()
        finally:
            self._sites.now = None
            self._progress.step("scoring")

    def _chosen(self) -> Outcome:
        """A choice of names, verified; then names that some modules spoil, module by module."""
        self._held_out.prepare()
        scale = self._scale()
        cast: Callable[[int, int], float] = free
        if self._asked.objective == "speed":
            cast = cast_seconds(self._subject.parameters[0].device)
        whole = Division()
        problem = self._problem(whole, cast, scale)
        first, curve = choose(problem, self._asked.tolerance)
        verified = partial(self._verified, problem, whole)
        tolerance, unmet = self._within_reach(verified, first.chosen)
        budget = Budget(len(problem.parts))
        wished = problem.cheapest(0.0)
        chosen = Repair(problem, verified, tolerance, budget).less(first.chosen)
        modules = {*filter(None, module_names(self._subject.model, all_names=True))}
        split = spoiled(problem, chosen, wished, modules)
        if split:
            division = Division(split, modules)
            finer = self._problem(division, cast, scale)
            wished = finer.cheapest(0.0)
            verified = partial(self._verified, finer, division)
            repair = Repair(finer, verified, tolerance, budget)
            start = frozenset(part for part in finer.parts if part._replace(module="") in chosen)
            better, _ = choose(finer, tolerance)
            if better.cost < problem.cost(chosen) and repair.holds(better.chosen):
                start = better.chosen
            problem, chosen = finer, start
        repair = Repair(problem, verified, tolerance, budget)
        others = (as_listed(problem, policy) for policy in known(self._held_out.device).values())
        chosen = repair.best(repair.more(chosen, wished), others)
        floor = self._held_out.shaken()
        return Outcome(
            problem=problem,
            by_site=lambda part_of: Problem(self._measured.found, part_of, costs, cast, scale),
            found=self._measured.found,
            chosen=chosen,
            tried=self._measured.tried(problem.parts),
            curve=curve,
            floor=floor,
            unmet=unmet,
            steps=self._steps + self._held_out.passes,
            verified=len(self._measured.verified) + 1,  # and that of rounded inputs
            done=self._progress.step,
        )

    def _problem(self, division: Division, cast: Callable[[int, int], float], scale: Scale) -> Problem:
        return Problem(self._measured.found, division.part_of, costs, cast, scale)

    def _within_reach(self, verified: Callable[[Chosen], Effect], first: Chosen) -> tuple[float, str]:
        """The tolerance, widened by the error that is there with every op in FP32; and what that is, in words."""
        tolerance = self._asked.tolerance
        if verified(first).meets(tolerance):
            return tolerance, ""
        everywhere = verified(frozenset())
        if everywhere.meets(tolerance):
            return tolerance, ""
        if everywhere.raised:
            return tolerance, f"with every op in FP32 the program raises {everywhere.raised}"
        lines = ", ".join(self._held_out.by_hand)
        what = f"casts that the program makes itself, at {lines}" if lines else "ops that no wrapper reaches"
        if self._asked.recipe is not None and self._asked.recipe.parameter_dtype == "bfloat16":
            what = f"the weights, which the recipe has in BF16, nor about {what}" if lines else "the weights in BF16"
        error = f"{everywhere.gradient_error:.1e}"
        said = f"with every op in FP32 the gradient error is {error} already: lists do not decide about {what}"
        return math.hypot(tolerance, everywhere.size), said

    def _verified(self, problem: Problem, division: Division, chosen: Chosen) -> Effect:
        """What a choice does to the held-out batches, from memory where it was measured already."""
        key = frozenset((*part, part in chosen) for part in problem.parts)
        if key not in self._measured.verified:
            decided = {*problem.parts}

            def is_low(site: Compared) -> bool | None:
                part = division.part(site)
                return part in chosen if part in decided else None

            self._measured.verified[key] = self._held_out.measured(lambda drawn: Divided(drawn, is_low))
            self._progress.step("verifying")
            self._keep()
        return self._measured.verified[key]


def costs(site: Scored) -> tuple[float, float]:
    """What a site costs in BF16 and in FP32, in the unit of the objective."""
    return site.worth.get(LOW, 0.0), site.worth.get(WIDE, 0.0)
