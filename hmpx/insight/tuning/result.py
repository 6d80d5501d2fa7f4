"""What a tuning came to, measured under the real lists, and beside known ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from hmpx import observation
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.tuning.charges import Scored
from hmpx.insight.tuning.choosing import Point
from hmpx.insight.tuning.dividing import as_listed, lists_and_rules
from hmpx.insight.tuning.found import Found
from hmpx.insight.tuning.held_out import HeldOut, Listed
from hmpx.insight.tuning.mark import Mark
from hmpx.insight.tuning.problem import Chosen, Effect, Part, Problem
from hmpx.insight.tuning.reasons import choices_of
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import FLOPS, Objective
from hmpx.insight.tuning.writing import policy_of, recipe_of
from hmpx.ops.build_policy import build_policy
from hmpx.ops.fp32_kernels import KernelsAsked
from hmpx.ops.policy import Policy
from hmpx.recipes.module_patterns import rules_for
from hmpx.recipes.recipe import Recipe, as_recipe

_UNITS = {"speed": "s", "coverage": "FLOP", "memory": "B"}


class Asked(NamedTuple):
    """What a user asks for, see `tune`."""

    base: Policy
    recipe: Recipe | None
    kernels: KernelsAsked
    objective: Objective
    tolerance: float
    seed: int
    progress: bool


class Outcome(NamedTuple):
    """What was chosen.

    by_site: the problem with each site a part of its own, by which lists are priced that divide a name. tried: choices
    that were verified, and what they did. curve: the choices for other weights of errors. unmet: what rounds whatever
    lists say, in words. verified: how many choices were. done: is told of each verification.
    """

    problem: Problem
    by_site: Callable[[Callable[[Scored], Part]], Problem]
    found: Found
    chosen: Chosen
    tried: Mapping[Chosen, Effect]
    curve: list[Point]
    floor: Effect | None
    unmet: str
    steps: int
    verified: int
    done: Callable[[str], None]


class _Marking:
    """Measures lists on the held-out batches, and prices them."""

    def __init__(self, outcome: Outcome, asked: Asked, sites: Sites, held_out: HeldOut) -> None:
        self._outcome, self._asked, self._sites, self._held_out = outcome, asked, sites, held_out
        self._parts = {site: Part(site.name, str(number)) for number, site in enumerate(outcome.found)}
        self._prices = outcome.by_site(self._parts.__getitem__)

    def mark(self, name: str, policy: Policy) -> tuple[Effect, Mark]:
        """What real lists do, and what they cost."""
        low: dict[Compared, bool] = {}
        with observation.observed(policy, self._asked.kernels, self._sites):
            effect = self._held_out.measured(lambda drawn: Listed(drawn, low))
        self._outcome.done("verifying")
        if effect.raised:
            chosen = as_listed(self._outcome.problem, policy)
            cost, share = self._outcome.problem.cost(chosen), self.share(_within(chosen))
            return effect, Mark(name, cost, effect.gradient_error, share, True, effect.raised)
        sites = {site for each, is_low in low.items() if (site := self._outcome.found.at(each)) is not None and is_low}
        cost = self._prices.cost({self._parts[site] for site in sites})
        return effect, Mark(name, cost, effect.gradient_error, self.share(sites.__contains__), True)

    def share(self, is_low: Callable[[Scored], bool]) -> float:
        """Of the FLOPs of matrix products, what is in BF16."""
        flops = {site: site.worth.get(FLOPS, 0.0) for site in self._outcome.found}
        whole = sum(flops.values())
        return sum(each for site, each in flops.items() if is_low(site)) / whole if whole else 0.0


def result(outcome: Outcome, asked: Asked, sites: Sites, held_out: HeldOut) -> Tuned:
    """The lists of a choice, what they do, and what others do."""
    problem, chosen = outcome.problem, outcome.chosen
    low, wide, rules = lists_and_rules(problem.parts, chosen)
    policy = policy_of(asked.base, low, wide)
    recipe = recipe_of(asked.recipe, policy, rules)
    before = held_out.passes
    marking = _Marking(outcome, asked, sites, held_out)
    with contextlib.ExitStack() as undo:
        for rule in rules_for([held_out.model], recipe):
            undo.callback(rule.remove)
            rule.apply()
        effect, mark = marking.mark("tuned", policy)
    marks = [mark, *(marking.mark(name, other)[1] for name, other in known(held_out.device).items())]
    met = effect.meets(asked.tolerance)
    unit = _UNITS[asked.objective]
    unmet = f"under these lists the program raises {effect.raised}" if effect.raised else outcome.unmet
    return Tuned(
        policy=policy,
        recipe=recipe,
        met=met,
        gradient_error=effect.gradient_error,
        gradient_bias=effect.gradient_bias,
        loss_change=effect.loss_change,
        loss_error=effect.loss_error,
        predicted=problem.predicted(chosen).gradient_error,
        floor=math.nan if outcome.floor is None else outcome.floor.gradient_error,
        share=mark.share,
        objective=asked.objective,
        tolerance=asked.tolerance,
        cost=mark.cost,
        unit=unit,
        choices=tuple(choices_of(problem, chosen, low, asked.tolerance, unit, outcome.tried)),
        marks=(*marks, Mark("all in FP32", problem.cost(()), 0.0, 0.0, True)),
        curve=tuple(
            Mark("", at.cost, at.effect.gradient_error, marking.share(_within(at.chosen)), False)
            for at in outcome.curve
        ),
        steps=outcome.steps + held_out.passes - before,
        verifications=outcome.verified + len(marks),
        unmet="" if met else unmet or "many errors add up: see what takes most of the budget below",
    )


def known(device: torch.device) -> dict[str, Policy]:
    """Lists that others use: the default ones, and those of `torch.autocast` on a device."""
    autocast = "autocast-cuda" if device.type == "cuda" else "autocast-cpu"
    policy = as_recipe(autocast).policy()
    assert policy is not None
    return {"default lists": build_policy(), autocast: policy}


def _within(chosen: Chosen) -> Callable[[Scored], bool]:
    names = {part.name for part in chosen}
    return lambda site: site.name in names
