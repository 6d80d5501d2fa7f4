"""What a tuning came to, measured under the real lists, and beside known ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hmpx import conversion
from hmpx.insight import observed
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.tuning.batches import Batches, Runs
from hmpx.insight.tuning.choice import amount
from hmpx.insight.tuning.costs import SLACK, Chosen, Costs
from hmpx.insight.tuning.effect import Effect
from hmpx.insight.tuning.lists import lists_and_rules, policy_of, recipe_of
from hmpx.insight.tuning.mark import Mark
from hmpx.insight.tuning.passes import Listed
from hmpx.insight.tuning.reasons import Reasons
from hmpx.insight.tuning.search import Search
from hmpx.insight.tuning.tuned import FP32, Tuned
from hmpx.insight.tuning.worth import UNITS, Objective, seconds
from hmpx.ops.build_policy import build_policy
from hmpx.ops.fp32_kernels import KernelsAsked
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policy import Policy
from hmpx.recipes.module_patterns import rules_for
from hmpx.recipes.recipe import Recipe, as_recipe


class Asked(NamedTuple):
    """What a user asks for, see `tune`."""

    base: Policy
    recipe: Recipe | None
    kernels: KernelsAsked
    objective: Objective
    tolerance: float
    progress: bool


@dataclass(frozen=True)
class Outcome:
    """What the search found.

    failed: choices that did not hold on the held-out batches. predicted: what a choice does to the batches of
    the search. unmet: what rounds whatever lists say, in words.
    """

    costs: Costs
    search: Search
    chosen: Chosen
    failed: Mapping[Chosen, Effect]
    predicted: Callable[[Chosen], Effect]
    unmet: str
    runs: Runs
    held_out: Batches


class _Lists(NamedTuple):
    """Lists, and what they come to in this model: the places in BF16, and rules for modules."""

    policy: Policy
    chosen: Chosen = Chosen()
    rules: Sequence[ModuleRule] = ()
    recipe: Recipe = Recipe()


class _Marked(NamedTuple):
    """What lists do to the held-out batches, what they cost, and the places that they have in BF16."""

    effect: Effect
    mark: Mark
    low: Chosen


def result(outcome: Outcome, asked: Asked) -> Tuned:
    """The lists of the choice, what they do, and what other lists do."""
    costs, search, runs = outcome.costs, outcome.search, outcome.runs
    lists, slower, timed = _lists_of(outcome.chosen, outcome, asked), "", None
    found = _marked("tuned", lists, outcome, asked)
    others = [_marked(name, _Lists(policy), outcome, asked) for name, policy in known(outcome).items()]
    for other in others:  # so that the answer is not behind lists that anybody has
        if _is_better(other, found, costs, asked):
            beside = _lists_of(other.low, outcome, asked)
            again = _marked("tuned", beside, outcome, asked)
            if _is_better(again, found, costs, asked):
                lists, found = beside, again
    if asked.objective == "speed" and lists.chosen:
        timed = _step_seconds(lists, outcome, asked)
        if timed[0] >= timed[1]:
            low, wide = (amount(each, "s") for each in timed)
            slower = f"a step takes {low} with the fastest lists that hold, and {wide} in FP32"
            lists, timed = _lists_of(Chosen(), outcome, asked), None
            found = _marked("tuned", lists, outcome, asked)
    effect, mark = found.effect, found.mark
    marks = [mark, *(other.mark for other in others), Mark(FP32, costs.of(Chosen()), 0.0, 0.0, True)]
    floor = outcome.held_out.of_rounded_inputs()
    met, unit = effect.meets(asked.tolerance), UNITS[asked.objective]
    unmet = f"under these lists the program raises {effect.raised}" if effect.raised else outcome.unmet
    predicted = outcome.predicted(lists.chosen).gradient_error
    reasons = Reasons(costs, search, lists.chosen, lists.policy.bf16, asked.tolerance, unit, outcome.failed, slower)
    return Tuned(
        policy=lists.policy,
        recipe=lists.recipe,
        met=met,
        gradient_error=effect.gradient_error,
        gradient_bias=effect.gradient_bias,
        loss_change=effect.loss_change,
        loss_error=effect.loss_error,
        predicted=predicted,
        floor=math.nan if floor is None else floor.gradient_error,
        share=mark.share,
        objective=asked.objective,
        tolerance=asked.tolerance,
        cost=mark.cost,
        unit=unit,
        choices=tuple(reasons.choices()),
        marks=tuple(marks),
        curve=tuple(_curve(search, costs)),
        steps=runs.passes,
        verifications=search.measured() + len(outcome.failed) + len(marks),
        unmet="" if met else unmet or "many errors add up: see what takes most of the budget below",
        step_seconds=timed,
    )


def known(outcome: Outcome) -> dict[str, Policy]:
    """Lists that others use: the default ones, and those of `torch.autocast` on the model's device."""
    device = outcome.runs.subject.parameters[0].device
    autocast = "autocast-cuda" if device.type == "cuda" else "autocast-cpu"
    policy = as_recipe(autocast).policy()
    assert policy is not None
    return {"default lists": build_policy(), autocast: policy}


def _lists_of(chosen: Chosen, outcome: Outcome, asked: Asked) -> _Lists:
    low, wide, rules = lists_and_rules(outcome.costs.sites, chosen)
    policy = policy_of(asked.base, low, wide)
    recipe = recipe_of(asked.recipe, policy, rules)
    return _Lists(policy, chosen, rules_for([outcome.runs.subject.model], recipe), recipe)


def _marked(name: str, lists: _Lists, outcome: Outcome, asked: Asked) -> _Marked:
    """Run the held-out batches under lists."""
    costs, low = outcome.costs, dict[Compared, bool]()
    with observed.observed(lists.policy, asked.kernels, outcome.runs.sites, lists.rules):
        effect = outcome.held_out.effect(lambda drawn: Listed(drawn, low), "verifying")
    if effect.raised:  # as the lists name the ops, for the run did not come to all of them
        low = {site.site: place.name in lists.policy.bf16 for place, sites in costs.sites.items() for site in sites}
    cost, share = (count(lambda site: low.get(site.site, False)) for count in (costs.of_sites, costs.share))
    places = [place for place in costs.free if all(low.get(site.site, False) for site in costs.sites[place])]
    return _Marked(effect, Mark(name, cost, effect.gradient_error, share, True, effect.raised), frozenset(places))


def _is_better(other: _Marked, found: _Marked, costs: Costs, asked: Asked) -> bool:
    """Whether other lists do less, at no more than a small part of the gain."""
    slack = SLACK * max(costs.of(Chosen()) - found.mark.cost, 0.0)
    holds = other.effect.meets(asked.tolerance) or not found.effect.meets(asked.tolerance)
    return holds and other.effect.size < found.effect.size and other.mark.cost <= found.mark.cost + slack


def _step_seconds(lists: _Lists, outcome: Outcome, asked: Asked) -> tuple[float, float]:
    """What forward and backward pass of a batch take under these lists, and in FP32 without hmpx."""
    subject, batch = outcome.runs.subject, outcome.held_out.batches[0]
    with conversion.install(lists.policy, kernels=asked.kernels, rules=lists.rules):
        low = seconds(lambda: subject.low(batch))
    with conversion.install(Policy(bf16=(), fp32=(), promote=()), kernels="native"):  # in the place of one in force
        return low, seconds(lambda: subject.wide(batch))


def _curve(search: Search, costs: Costs) -> list[Mark]:
    """The beginnings of the ranking, with the errors of single names, taken to be independent."""
    found, square = [], 0.0
    for count in range(len(search.order) + 1):
        chosen = Chosen().union(*search.order[:count])
        square += search.harm(search.order[count - 1]) if count else 0.0
        share = sum(each.flops for place in chosen for each in costs.sites[place])
        found.append(Mark("", costs.of(chosen), math.sqrt(square), share / (costs.flops or 1.0), False))
    return sorted(found, key=lambda mark: mark.cost)
