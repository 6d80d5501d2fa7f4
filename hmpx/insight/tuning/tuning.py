"""One tuning: FP32 runs, the search, the held-out batches, and the lists measured as they will be used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.tuning.choice import Mark, amount
from hmpx.insight.tuning.costs import SLACK, Chosen, Costs, Look, NameInModule
from hmpx.insight.tuning.level import LEVELS, Level, decidable
from hmpx.insight.tuning.lists import lists_and_rules, policy_of, recipe_of
from hmpx.insight.tuning.progress import Progress
from hmpx.insight.tuning.reasons import Reasons
from hmpx.insight.tuning.runs import Effect, Exact, Make, Mixed, Runs, UnderLists
from hmpx.insight.tuning.search import Search
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import UNITS, Objective, seconds
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.build_policy import build_policy
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.recipes.module_patterns import module_names, rules_for
from hmpx.recipes.recipe import Recipe
from hmpx.recipes.stated import as_recipe


class Request(NamedTuple):
    """What a user asks for, see `tune`. base: the lists to begin with."""

    base: Policy
    recipe: Recipe | None
    kernels: KernelsAsked
    objective: Objective
    tolerance: float
    progress: bool
    level: Level = LEVELS["bf16"]


class Measured(NamedTuple):
    """Lists, what they do to the held-out batches, and the places that they have in BF16."""

    policy: Policy
    recipe: Recipe
    effect: Effect
    mark: Mark
    low: Chosen


class Tuning:
    """One tuning while it is made. tuning: how many of the batches are to tune on; the others are held out."""

    def __init__(self, subject: Subject, tuning: int, asked: Request) -> None:
        self._subject, self._asked = subject, asked
        self._progress = Progress(3 * len(subject.batches) + 20, asked.progress)
        self._runs = Runs(subject, tuning, self._progress.step)
        modules = {*module_names(subject.model, all_names=True)}
        self._costs = Costs(
            asked.objective,
            subject.parameters[0].device,
            lambda site: NameInModule(site.op, site.module if site.module in modules else ""),
            asked.level,
        )
        self._is_ordered = False  # whether the batch that shows most stands first
        self._verified: dict[Chosen, Measured] = {}

    def run(self) -> Tuned:
        try:
            with observed.observed(self._everything(), self._asked.kernels, self._runs.sites):
                self._run_in_fp32()
                nothing, unmet = self._in_fp32_as_listed()
                chosen, reasons = self._found(nothing)
            return self._result(chosen, reasons, unmet)
        finally:
            self._progress.end()

    def _everything(self) -> Policy:
        """Every op that can be decided about in the low list; a user's own functions as they are listed."""
        own = self._asked.base.user_functions()
        low = [name for name, rule in own.items() if rule is Rule.BF16]
        wide = [name for name, rule in own.items() if rule is Rule.FP32]
        names = tuple(sorted(decidable(self._asked.level)))
        if self._asked.level.low == "fp8":
            return Policy(tuple(low), tuple(wide), fp8=names, fp8_format=self._asked.base.fp8_format)
        return Policy(bf16=(*names, *low), fp32=tuple(wide))

    def _run_in_fp32(self) -> None:
        """All batches, with a look at the calls of those to tune on."""
        tuning = len(self._runs.tuning)
        self._runs.prepare(lambda drawn, number: Look(drawn, self._costs, number) if number < tuning else Exact(drawn))
        if not self._costs.of_place:
            raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
        if math.isnan(self._runs.noise):
            raise HmpxError("tune: the batches are all alike, so there is no noise between them; give some that differ")

    def _in_fp32_as_listed(self) -> tuple[Effect, str]:
        """What remains with every op in the fp32 list; and where that is too much, what makes it, in words."""
        tolerance, runs, wide = self._asked.tolerance, self._runs, self._mixed(Chosen())
        if not runs.effect(wide, runs.tuning[:1], "searching").size:
            return Effect(), ""
        runs.check_repeats()
        found = [runs.effect(wide, batches, "searching") for batches in (runs.tuning, runs.held_out)]
        worst = max(found, key=lambda effect: effect.size)
        if worst.raised:
            return Effect(), f"with every op in FP32 the program raises {worst.raised}"
        lines = ", ".join(runs.by_hand)
        what = f"casts that the program makes itself, at {lines}" if lines else "ops that no wrapper reaches"
        if self._asked.recipe is not None and self._asked.recipe.parameter_dtype == "bfloat16":
            what = f"the weights in BF16, and {what}" if lines else "the weights in BF16"
        said = f"with every op in FP32 the gradient error is {worst.gradient_error:.2g} already, because of {what}"
        return worst, said if worst.size > tolerance else ""

    def _found(self, nothing: Effect) -> tuple[Chosen, Reasons]:
        """What is to be in BF16, and why. nothing: what remains with every op in FP32."""
        costs, runs, tolerance = self._costs, self._runs, self._asked.tolerance
        if nothing.size > tolerance:  # the choice may add as much as if that were not there
            tolerance = math.hypot(tolerance, nothing.size)
        names = sorted({place.name for place in costs.free})
        units = [frozenset(place for place in costs.free if place.name == name) for name in names]
        self._progress.expect(2 * len(runs.tuning) + 4 * len(runs.held_out) + 2)
        search = Search(self._measured, costs, tolerance, nothing)
        chosen = search.dropped(search.run(units), lambda chosen: self._of_choice(chosen).effect.size)
        search.effect(chosen)
        failed = {low: each.effect for low, each in self._verified.items() if each.effect.size > tolerance}
        return chosen, Reasons(costs, search, self._asked.tolerance, UNITS[self._asked.objective], failed)

    def _measured(self, chosen: Chosen, first: int | None = None, enough: float = math.inf) -> Effect:
        tuning = self._runs.tuning
        effect = self._runs.effect(self._mixed(chosen), tuning[:first], "searching", enough)
        if not self._is_ordered and len(effect.by_batch) == len(tuning):
            by_batch = dict(zip(tuning, effect.by_batch, strict=True))
            tuning.sort(key=lambda number: -by_batch[number])
            effect = dataclasses.replace(effect, by_batch=tuple(by_batch[number] for number in tuning))
            self._is_ordered = True
        return effect

    def _mixed(self, chosen: Chosen) -> Make:
        """A pass with these places in BF16."""

        def is_low(site: Compared) -> bool | None:
            place = self._costs.place_of(site)
            return place in chosen if place in self._costs.of_place else None

        return lambda drawn: Mixed(drawn, is_low)

    def _result(self, chosen: Chosen, reasons: Reasons, unmet: str) -> Tuned:
        """The lists of the choice, what they do, and what other lists do."""
        asked, slower, timed = self._asked, "", None
        device = self._subject.parameters[0].device
        autocast = "autocast-cuda" if device.type == "cuda" else "autocast-cpu"
        policy = as_recipe(autocast).policy()
        assert policy is not None
        found = self._of_choice(chosen)
        known = [("default lists", build_policy()), (autocast, policy)]
        if asked.level.low == "fp8":
            names = {place.name for place in self._costs.free}
            known = [("all in FP8", policy_of(asked.base, names, (), asked.level))]
        others = [self._of_lists(*each) for each in known]
        for other in others:  # so that the answer is not behind lists that anybody has
            if self._is_better(other, found):
                again = self._of_choice(other.low)
                found = again if self._is_better(again, found) else found
        if asked.objective == "speed" and found.low:
            timed = self._step_seconds(found)
            if timed[0] >= timed[1]:
                low, wide = (amount(each, "s") for each in timed)
                slower = f"a step takes {low} with the fastest lists that hold, and {wide} in FP32"
                found, timed = self._of_choice(Chosen()), None
        if found.low not in reasons.search.measured:
            with observed.observed(self._everything(), asked.kernels, self._runs.sites):
                reasons.search.effect(found.low)
        effect, met = found.effect, found.effect.size <= asked.tolerance
        error = self._of_choice(Chosen()).effect.gradient_error if asked.level.low == "fp8" else 0.0
        nothing = Mark(asked.level.all_wide, self._costs.of(Chosen()), error, 0.0)
        if effect.raised:
            unmet = f"under these lists the program raises {effect.raised}"
        return Tuned(
            policy=found.policy,
            recipe=found.recipe,
            met=met,
            gradient_error=effect.gradient_error,
            gradient_bias=effect.gradient_bias,
            loss_change=effect.loss_change,
            loss_error=effect.loss_error,
            predicted=reasons.search.measured[found.low].gradient_error,
            share=found.mark.share,
            objective=asked.objective,
            tolerance=asked.tolerance,
            cost=found.mark.cost,
            unit=UNITS[asked.objective],
            choices=tuple(reasons.choices(found.low, getattr(found.policy, asked.level.low), slower)),
            marks=(found.mark, *(each.mark for each in others), nothing),
            steps=self._runs.passes,
            unmet="" if met else unmet or "many errors add up, none of which is over the tolerance by itself",
            step_seconds=timed,
            low=asked.level.low,
        )

    def _of_choice(self, chosen: Chosen) -> Measured:
        """The lists and rules of a choice, measured."""
        if chosen not in self._verified:
            level = self._asked.level
            low, wide, modules = lists_and_rules([*self._costs.of_place], chosen, level)
            policy = policy_of(self._asked.base, low, wide, level)
            found = self._of_lists("tuned", policy, recipe_of(self._asked.recipe, policy, modules))
            self._verified[chosen] = found._replace(low=chosen)
        return self._verified[chosen]

    def _of_lists(self, name: str, policy: Policy, recipe: Recipe | None = None) -> Measured:
        """Run the held-out batches under lists."""
        costs, low, runs = self._costs, dict[Compared, bool](), self._runs
        fp8 = self._asked.level.low == "fp8"
        with observed.observed(policy, self._asked.kernels, runs.sites, self._rules(recipe)):
            effect = runs.effect(lambda drawn: UnderLists(drawn, low, fp8), runs.held_out, "verifying")
        wide = {costs.place_of(site) for site, is_low in low.items() if not is_low}
        places = frozenset({costs.place_of(site) for site in low} & costs.of_place.keys() - wide)
        if effect.raised:  # as the lists name the ops, for the run did not come to all of them
            places = frozenset(
                place for place in costs.of_place if place.name in getattr(policy, self._asked.level.low)
            )
        share = costs.share(places & costs.free if fp8 else places)
        mark = Mark(name, costs.of(places), effect.gradient_error, share, effect.raised)
        return Measured(policy, recipe or Recipe(), effect, mark, places & costs.free)

    def _rules(self, recipe: Recipe | None) -> Sequence[ModuleRule]:
        return rules_for([self._subject.model], recipe) if recipe is not None else ()

    def _is_better(self, other: Measured, found: Measured) -> bool:
        """Whether other lists do less, at no more than a small part of the gain."""
        slack = SLACK * max(self._costs.of(Chosen()) - found.mark.cost, 0.0)
        holds = other.effect.size <= self._asked.tolerance or found.effect.size > self._asked.tolerance
        return holds and other.effect.size < found.effect.size and other.mark.cost <= found.mark.cost + slack

    def _step_seconds(self, lists: Measured) -> tuple[float, float]:
        """What forward and backward pass of a batch take under these lists, and in FP32 without hmpx."""
        subject, batch = self._subject, self._subject.batches[self._runs.held_out[0]]
        with conversion.install(lists.policy, kernels=self._asked.kernels, rules=self._rules(lists.recipe)):
            low = seconds(lambda: subject.low(batch))
        with conversion.install(Policy(bf16=(), fp32=(), promote=()), kernels="native"):  # in the place of one in force
            return low, seconds(lambda: subject.wide(batch))
