"""Finds lists: FP32 runs, the search, and the lists measured on held-out batches, as they will be used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.comparing.calls import CallSite
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.tuning.choices import amount, choices_of, lists_and_rules, policy_of, recipe_of
from hmpx.insight.tuning.plot import Mark
from hmpx.insight.tuning.runs import Effect, Progress, Runs, exactly, mixed, under_lists
from hmpx.insight.tuning.search import Search
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import SLACK, UNITS, Chosen, Costs, Look, Low, Objective, seconds
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.policies.build_policy import build_policy
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.recipes.module_patterns import module_names, rules_for
from hmpx.recipes.reading import as_recipe
from hmpx.recipes.recipe import DEFAULT, Recipe


class Measured(NamedTuple):
    """Lists, what they do to the held-out batches, and the places that they have in low precision."""

    policy: Policy
    recipe: Recipe
    effect: Effect
    mark: Mark
    chosen: Chosen


@dataclass
class Tuning:
    """One tuning while it is made, see `tune`.

    tuning: how many of the batches are to tune on; the others are held out. base: the lists to begin with.
    """

    subject: Subject
    tuning: int
    progress: Progress
    base: Policy
    recipe: Recipe | None
    kernels: KernelsAsked
    objective: Objective
    low: Low
    tolerance: float

    def __post_init__(self) -> None:
        self._runs = Runs(self.subject, self.tuning, self.progress)
        modules = module_names(self.subject.model, all_names=True)
        self._costs = Costs(self.objective, self.low, modules, self.subject.parameters[0].device)
        self._verified: dict[Chosen, Measured] = {}

    def run(self) -> Tuned:
        """Find the lists, and measure them beside known ones."""
        costs, runs = self._costs, self._runs
        with self._everything():
            runs.prepare(lambda number: Look(costs, number) if number < self.tuning else exactly)
            if not costs.of_place:
                raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
            if math.isnan(runs.noise):
                raise HmpxError(
                    "tune: the batches are all alike, so there is no noise between them; give some that differ"
                )
            nothing, unmet = self._remains_in_fp32()
            # Where more remains than is allowed, the choice may add as much as is allowed.
            tolerance = math.hypot(self.tolerance, nothing.size) if nothing.size > self.tolerance else self.tolerance
            search = Search(self._measured, runs.tuning, costs, tolerance, nothing)
            names = sorted({place.name for place in costs.free})
            chosen = search.run([frozenset(place for place in costs.free if place.name == name) for name in names])
            search.effect(chosen)
        if self._of_choice(chosen).effect.size > tolerance:
            with self._everything():
                chosen = search.dropped(chosen, lambda some: self._of_choice(some).effect.size)
                search.effect(chosen)
        failed = {some: each.effect for some, each in self._verified.items() if each.effect.size > tolerance}
        found, others = self._best(self._of_choice(chosen))
        found, slower, timed = self._timed(found)
        if found.chosen not in search.measured:
            with self._everything():
                search.effect(found.chosen)
        effect, met = found.effect, found.effect.size <= self.tolerance
        error = self._of_choice(Chosen()).effect.gradient_error if self.low == "fp8" else 0.0
        wide = Mark(f"all in {costs.wide.upper()}", costs.of(Chosen()), error, 0.0)
        if effect.raised:
            unmet = f"under these lists the program raises {effect.raised}"
        low = getattr(found.policy, self.low)
        return Tuned(
            policy=found.policy,
            recipe=found.recipe,
            met=met,
            gradient_error=effect.gradient_error,
            gradient_bias=effect.gradient_bias,
            loss_change=effect.loss_change,
            loss_error=effect.loss_error,
            predicted=search.measured[found.chosen].gradient_error,
            share=found.mark.share,
            objective=self.objective,
            tolerance=self.tolerance,
            cost=found.mark.cost,
            unit=UNITS[self.objective],
            choices=tuple(choices_of(costs, search, self.tolerance, failed, found.chosen, low, slower)),
            marks=(found.mark, *(each.mark for each in others), wide),
            steps=self.progress.done,
            unmet="" if met else unmet or "many errors add up, none of which is over the tolerance by itself",
            step_seconds=timed,
            low=self.low,
        )

    def _everything(self) -> contextlib.AbstractContextManager:
        """Put every op that can be decided about in the low list; a user's own functions as they are listed."""
        own, names = self.base.user_functions(), tuple(sorted(self._costs.names))
        low, wide = (tuple(name for name, rule in own.items() if rule is each) for each in (Rule.BF16, Rule.FP32))
        policy = Policy(bf16=(*names, *low), fp32=wide)
        if self.low == "fp8":
            policy = Policy(low, wide, fp8=names, fp8_format=self.base.fp8_format)
        return observed.observed(policy, self.kernels, self._runs.sites)

    def _remains_in_fp32(self) -> tuple[Effect, str]:
        """Return what remains with every op in the fp32 list; and where that is too much, what makes it, in words."""
        runs = self._runs
        if not self._measured(Chosen(), runs.tuning[:1]).size:
            return Effect(), ""
        runs.check_repeats()
        found = [self._measured(Chosen(), batches) for batches in (runs.tuning, runs.held_out)]
        worst = max(found, key=lambda effect: effect.size)
        if worst.raised:
            return Effect(), f"with every op in FP32 the program raises {worst.raised}"
        lines = ", ".join(runs.by_hand)
        what = f"casts that the program makes itself, at {lines}" if lines else "ops that no wrapper reaches"
        if self.recipe is not None and self.recipe.parameter_dtype == "bfloat16":
            what = f"the weights in BF16, and {what}" if lines else "the weights in BF16"
        said = f"with every op in FP32 the gradient error is {worst.gradient_error:.2g} already, because of {what}"
        return worst, said if worst.size > self.tolerance else ""

    def _measured(self, chosen: Chosen, batches: Sequence[int], enough: float = math.inf) -> Effect:
        """Return what these places in low precision change in some batches."""
        costs = self._costs

        def is_low(site: CallSite) -> bool | None:
            place = costs.place_of(site)
            return place in chosen if place in costs.of_place else None

        return self._runs.effect(mixed(is_low), batches, "searching", enough)

    def _of_choice(self, chosen: Chosen) -> Measured:
        """Return the lists and rules of a choice, measured."""
        if chosen not in self._verified:
            low, wide, modules = lists_and_rules([*self._costs.of_place], chosen, self.low)
            policy = policy_of(self.base, self.low, low, wide)
            found = self._of_lists("tuned", policy, recipe_of(self.recipe, policy, modules))
            self._verified[chosen] = found._replace(chosen=chosen)
        return self._verified[chosen]

    def _of_lists(self, name: str, policy: Policy, recipe: Recipe = DEFAULT) -> Measured:
        """Run the held-out batches under lists."""
        costs, runs = self._costs, self._runs
        low: dict[CallSite, bool] = {}
        with observed.observed(policy, self.kernels, runs.sites, rules_for([self.subject.model], recipe)):
            effect = runs.effect(under_lists(low, self.low), runs.held_out, "verifying")
        ran = {is_low: {costs.place_of(site) for site in low if low[site] is is_low} for is_low in (True, False)}
        places = costs.free & (ran[True] - ran[False])
        if effect.raised:  # as the lists name the ops, for the run did not come to all of them
            places = frozenset(place for place in costs.of_place if place.name in getattr(policy, self.low))
        mark = Mark(name, costs.of(places), effect.gradient_error, costs.share(places), effect.raised)
        return Measured(policy, recipe, effect, mark, places & costs.free)

    def _best(self, found: Measured) -> tuple[Measured, list[Measured]]:
        """Return the answer, and the known lists beside it; where one of these does less for as much, it decides."""
        autocast = f"autocast-{'cuda' if self.subject.parameters[0].is_cuda else 'cpu'}"
        known = {"default lists": build_policy(), autocast: as_recipe(autocast).policy() or Policy()}
        if self.low == "fp8":
            names = {place.name for place in self._costs.free}
            known = {"all in FP8": policy_of(self.base, self.low, names, ())}
        others = [self._of_lists(*each) for each in known.items()]
        for other in others:
            if self._is_better(other, found):
                again = self._of_choice(other.chosen)
                found = again if self._is_better(again, found) else found
        return found, others

    def _is_better(self, other: Measured, found: Measured) -> bool:
        """Return whether other lists do less, at no more than a small part of the gain."""
        slack = SLACK * max(self._costs.of(Chosen()) - found.mark.cost, 0.0)
        holds = other.effect.size <= self.tolerance or found.effect.size > self.tolerance
        return holds and other.effect.size < found.effect.size and other.mark.cost <= found.mark.cost + slack

    def _timed(self, found: Measured) -> tuple[Measured, str, tuple[float, float] | None]:
        """Time whole steps for "speed". Where FP32 is not slower, everything stays in FP32; the words say so."""
        if self.objective != "speed" or not found.chosen:
            return found, "", None
        subject, batch = self.subject, self.subject.batches[self._runs.held_out[0]]
        rules = rules_for([subject.model], found.recipe)
        with conversion.install(found.policy, kernels=self.kernels, rules=rules):
            low = seconds(lambda: subject.low(batch))
        with conversion.install(Policy(bf16=(), fp32=(), promote=()), kernels="native"):  # in the place of one in force
            wide = seconds(lambda: subject.wide(batch))
        if low < wide:
            return found, "", (low, wide)
        words = f"a step takes {amount(low, 's')} with the fastest lists that hold, and {amount(wide, 's')} in FP32"
        return self._of_choice(Chosen()), words, None
