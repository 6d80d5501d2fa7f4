"""`tune`: scores, a choice, its verification, and what is made of them."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hmpx import observation
from hmpx.casts.build_policy import build_policy
from hmpx.casts.fp32_kernels import KernelsAsked
from hmpx.casts.ops import catalog
from hmpx.casts.policy import Policy
from hmpx.errors import HmpxError, did_you_mean
from hmpx.insight.comparing import noise
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.lists import lists_meant
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.comparing.subject import Loss, Subject
from hmpx.insight.stance import eager
from hmpx.insight.tensors import LOW
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.choosing import Point, choose
from hmpx.insight.tuning.held_out import Divided, Exact, HeldOut, Listed
from hmpx.insight.tuning.mark import Mark
from hmpx.insight.tuning.problem import Chosen, Effect, Part, Problem, Scale
from hmpx.insight.tuning.progress import Progress
from hmpx.insight.tuning.reasons import choices_of
from hmpx.insight.tuning.repairing import Repair
from hmpx.insight.tuning.scoring import Kept, Rescoring, Scoring
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import OBJECTIVES, Measuring, Objective, Worth, cast_seconds, free
from hmpx.insight.tuning.writing import policy_of, recipe_of
from hmpx.recipes.recipe import Recipe, as_recipe

_DIRECTIONS = 3  # along which the weights are shifted, for each batch
_LEAST = 2  # batches to score, and to hold out
_UNITS = {"speed": "s", "coverage": "FLOP", "memory": "B"}


def tune(
    model: torch.nn.Module,
    batches: Sequence[tuple],
    loss: Loss,
    *,
    objective: Objective = "speed",
    tolerance: float = 0.1,
    held_out: Sequence[tuple] | None = None,
    lists: Policy | Recipe | Mapping[str, Any] | str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Tuned:
    """Find the op lists of a model: as much in BF16 as the training bears.

    Each op is scored by what its rounding in BF16 would do to the gradients, in its forward and its backward pass, from
    a few passes for all of them. What BF16 brings is measured, the cheapest choice is a minimum cut, and it is verified
    on batches that were not scored, against FP32, and repaired.

    Args:
        model: in FP32. It is as it was afterwards: parameters, gradients, buffers, random number generators.
        batches: a list of tuples of positional arguments; at least four, or two beside `held_out`.
        loss: called as ``loss(model, *batch)``, returns a scalar tensor.
        objective: what to make small: "speed", the time of forward and backward passes on this device; "coverage", the
            FLOPs of matrix products in FP32; "memory", the bytes that are saved for the backward pass.
        tolerance: the gradient error that is allowed, in units of the noise between batches; the bias may be half of
            it, and the loss may change by as much of the noise between losses. See `Comparison`.
        held_out: batches to verify on; None takes the last third of `batches`.
        lists: where to begin, as for `compare`: they decide about what the model does not call.
        seed: of the directions along which the weights are shifted.
        progress: show how far it is, on standard error.

    Raises:
        HmpxError: something above does not fit; the loss in FP32 is another one when it is computed again.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> tuned = hmpx.tune(model, batches, loss, objective="coverage", progress=False)
        >>> "linear" in tuned.policy.bf16, tuned.met
        (True, True)
    """
    _check(objective, tolerance, loss)
    policy, recipe, kernels = lists_meant(lists, "tune")
    subject = Subject(model, batches, loss, recipe, "tune")
    scored, verified = _divided(subject, batches if held_out is None else [*batches], held_out)
    low = [name for name, p in model.named_parameters() if p.dtype in LOW]
    if low:
        raise HmpxError(f"tune: parameter {low[0]!r} is in low precision already; tune begins with a model in FP32")
    with contextlib.ExitStack() as undo:
        undo.enter_context(subject.gradients_kept())
        undo.enter_context(eager())
        return _Tuning(subject, scored, verified, policy, recipe, kernels, objective, tolerance, seed, progress).run()


def _check(objective: str, tolerance: float, loss: object) -> None:
    if objective not in OBJECTIVES:
        raise HmpxError(f"tune: objective {objective!r} does not exist{did_you_mean(objective, OBJECTIVES)}")
    if not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise HmpxError(f"tune: tolerance={tolerance!r} is no gradient error, in units of the noise between batches")
    if loss is None:
        raise HmpxError("tune: it needs a loss, called as loss(model, *batch), whose gradients are looked at")


def _divided(subject: Subject, batches: Sequence[tuple], held_out: Sequence[tuple] | None) -> tuple[list, list]:
    """The batches to score, and those to verify on."""
    given = subject.batches
    if held_out is None:
        last = max(_LEAST, len(given) // 3)
        scored, verified = given[:-last], given[-last:]
    else:
        scored, verified = given, [batch if isinstance(batch, tuple) else (batch,) for batch in held_out]
    if min(len(scored), len(verified)) < _LEAST:
        beside = "" if held_out is None else f" and {len(verified)} held out"
        raise HmpxError(
            f"tune: {len(given)} batch{'es' if len(given) > 1 else ''}{beside}: the noise between batches is the scale "
            "of every error, and takes two to score and two to verify on; give four or more that differ"
        )
    return scored, verified


def decidable() -> frozenset[str]:
    """The names that are put into a list: of ops that make new values."""
    return frozenset(name for name, op in catalog().items() if op.computes and not op.view and name[0] != "_")


class _Tuning:
    """One tuning while it is made."""

    def __init__(
        self,
        subject: Subject,
        scored: list[tuple],
        verified: list[tuple],
        base: Policy,
        recipe: Recipe | None,
        kernels: KernelsAsked,
        objective: Objective,
        tolerance: float,
        seed: int,
        progress: bool,
    ) -> None:
        self._subject, self._batches, self._base, self._recipe = subject, scored, base, recipe
        self._kernels: KernelsAsked = kernels
        self._objective, self._tolerance, self._seed = objective, tolerance, seed
        self._sites = Sites()
        self._found: dict[Compared, Scored] = {}
        self._measuring = Measuring(objective)
        self._held_out = HeldOut(subject, self._sites, verified)
        self._names = decidable()
        self._steps = 0
        self._cast: Callable[[int, int], float] = free
        self._progress = Progress(len(scored) * (1 + _DIRECTIONS) + 4 * len(verified), progress)

    def run(self) -> Tuned:
        users = self._base.user_functions()
        everything = Policy(
            bf16=(*sorted(self._names), *(name for name, rule in users.items() if rule.value == "bf16")),
            fp32=tuple(name for name, rule in users.items() if rule.value == "fp32"),
        )
        try:
            with observation.observed(everything, self._kernels, self._sites):
                scale = self._score()
                if not self._found:
                    raise HmpxError(
                        "tune: the model calls no op that a list could name: there is nothing to choose from"
                    )
                problem = self._problem(scale)
                first, curve = choose(problem, self._tolerance)
                self._held_out.prepare()
                repair = Repair(problem, self._verified, self._tolerance)
                chosen = repair.run(first.chosen, problem.cheapest(0.0))
                floor = self._held_out.shaken()
            return self._result(problem, chosen, curve, floor, repair)
        finally:
            self._progress.end()

    def _score(self) -> Scale:
        subject, losses, units = self._subject, [], noise.Noise()
        h = noise.step_size(subject.parameters)
        shifts = noise.shifts(subject.parameters, h, _DIRECTIONS, self._seed)
        for number, batch in enumerate(self._batches):
            self._sites.begin_batch(number)
            kept = Kept()
            scoring = Scoring(self._found, kept, number, self._names, self._measuring.look if number == 0 else None)
            exact, gradients = self._observed(scoring, partial(subject.wide, batch, also=scoring.inputs))
            if number == 0:
                again, _ = self._observed(Exact({}), partial(subject.wide, batch, False))
                subject.check_repeats(exact, again)
            units.add(gradients, gradients)
            losses.append(exact)
            for direction, shift in enumerate(shifts, 1):
                rescoring = Rescoring(self._found, kept, number, direction)
                self._observed(rescoring, partial(subject.shifted, batch, shift, rescoring.wanted))
        if math.isnan(units.noise):
            raise HmpxError("tune: the batches are all alike, so there is no noise between them; give some that differ")
        return Scale(len(self._batches), _DIRECTIONS, h, units.noise, statistics.stdev(losses) or math.inf)

    def _observed(self, now: Any, work: Callable[[], Any]) -> Any:
        self._sites.now = now
        self._steps += 1
        try:
            return work()
        finally:
            self._sites.now = None
            if isinstance(now, Scoring | Rescoring):
                now.settle()
            self._progress.step("scoring")

    def _problem(self, scale: Scale) -> Problem:
        self._scale = scale
        if self._objective == "speed":
            self._cast = cast_seconds(self._subject.parameters[0].device)
        return Problem(self._found.values(), lambda site: Part(site.name), self._costs, self._cast, scale)

    def _costs(self, site: Scored) -> tuple[float, float]:
        worth = self._measuring.found.get(site, Worth())
        if self._objective == "speed":
            return worth.low_seconds, worth.wide_seconds
        if self._objective == "memory":
            return worth.low_bytes, worth.wide_bytes
        return 0.0, worth.flops

    def _verified(self, chosen: Chosen) -> Effect:
        known = {part.name for part in chosen}
        decided = {site.name for site in self._found.values()}
        effect = self._held_out.measured(
            lambda drawn: Divided(drawn, lambda site: site.op in known if site.op in decided else None)
        )
        self._progress.step("verifying")
        return effect

    def _result(self, problem: Problem, chosen: Chosen, curve: list[Point], floor: Effect, repair: Repair) -> Tuned:
        low = {part.name for part in chosen}
        policy = policy_of(self._base, low, {part.name for part in problem.parts} - low)
        effect, mark = self._marked("tuned", policy)
        device = "cuda" if self._subject.parameters[0].is_cuda else "cpu"
        others = {"default lists": build_policy(), f"autocast-{device}": as_recipe(f"autocast-{device}").policy()}
        marks = [mark, *(self._marked(name, other)[1] for name, other in others.items() if other is not None)]
        marks.append(Mark("all in FP32", problem.cost(()), 0.0, 0.0, True))
        return Tuned(
            policy=policy,
            recipe=recipe_of(self._recipe, policy),
            met=effect.meets(self._tolerance),
            gradient_error=effect.gradient_error,
            gradient_bias=effect.gradient_bias,
            loss_change=effect.loss_change,
            predicted=problem.predicted(chosen).gradient_error,
            floor=floor.gradient_error,
            share=mark.share,
            objective=self._objective,
            tolerance=self._tolerance,
            cost=mark.cost,
            unit=_UNITS[self._objective],
            choices=choices_of(problem, chosen, self._tolerance, _UNITS[self._objective]),
            marks=tuple(marks),
            curve=tuple(Mark("", at.cost, at.effect.gradient_error, self._share(at.chosen), False) for at in curve),
            steps=self._steps + self._held_out.passes,
            verifications=len(repair.tried) + len(marks) - 1,
        )

    def _marked(self, name: str, policy: Policy) -> tuple[Effect, Mark]:
        """What real lists do to the held-out batches, and what they cost."""
        low: set[Compared] = set()
        with observation.observed(policy, self._kernels, self._sites):
            effect = self._held_out.measured(lambda drawn: Listed(drawn, low))
        self._progress.step("verifying")
        each = {site: Part(site.name, str(number)) for number, site in enumerate(self._found.values())}
        by_site = Problem(self._found.values(), each.__getitem__, self._costs, self._cast, self._scale)
        cost = by_site.cost({part for site, part in each.items() if site.site in low})
        return effect, Mark(name, cost, effect.gradient_error, self._share_of(lambda site: site.site in low), True)

    def _share(self, chosen: Chosen) -> float:
        names = {part.name for part in chosen}
        return self._share_of(lambda site: site.name in names)

    def _share_of(self, is_low: Callable[[Scored], bool]) -> float:
        flops = {site: worth.flops for site, worth in self._measuring.found.items()}
        whole = sum(flops.values())
        return sum(each for site, each in flops.items() if is_low(site)) / whole if whole else 0.0
