"""Finds lists: FP32 runs, the search, and the lists measured on held-out batches, as they will be used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.tuning.choices import amount, choices_of
from hmpx.insight.tuning.lists import lists_and_rules, policy_of, recipe_of
from hmpx.insight.tuning.plot import Mark
from hmpx.insight.tuning.runs import Effect, Exact, Make, Mixed, Progress, Runs, UnderLists
from hmpx.insight.tuning.search import Search
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import SLACK, UNITS, Chosen, Costs, Look, Low, Objective, seconds
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
    low: Low
    tolerance: float


class Measured(NamedTuple):
    """Lists, what they do to the held-out batches, and the places that they have in low precision."""

    policy: Policy
    recipe: Recipe
    effect: Effect
    mark: Mark
    chosen: Chosen


class Tuning:
    """One tuning while it is made. tuning: how many of the batches are to tune on; the others are held out."""

    def __init__(self, subject: Subject, tuning: int, asked: Request, progress: Progress) -> None:
        self._subject, self._asked, self._progress = subject, asked, progress
        self._runs = Runs(subject, tuning, progress)
        modules = module_names(subject.model, all_names=True)
        self._costs = Costs(asked.objective, asked.low, modules, subject.parameters[0].device)
        self._verified: dict[Chosen, Measured] = {}

    def run(self) -> Tuned:
        """Find the lists, and measure them beside known ones."""
        asked, costs, runs = self._asked, self._costs, self._runs
        with self._everything():
            self._run_in_fp32()
            nothing, unmet = self._remains_in_fp32()
            # Where more remains than is allowed, the choice may add as much as is allowed.
            tolerance = math.hypot(asked.tolerance, nothing.size) if nothing.size > asked.tolerance else asked.tolerance
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
        effect, met = found.effect, found.effect.size <= asked.tolerance
        error = self._of_choice(Chosen()).effect.gradient_error if asked.low == "fp8" else 0.0
        wide = Mark(f"all in {costs.wide.upper()}", costs.of(Chosen()), error, 0.0)
        if effect.raised:
            unmet = f"under these lists the program raises {effect.raised}"
        low = getattr(found.policy, asked.low)
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
            objective=asked.objective,
            tolerance=asked.tolerance,
            cost=found.mark.cost,
            unit=UNITS[asked.objective],
            choices=tuple(choices_of(costs, search, asked.tolerance, failed, found.chosen, low, slower)),
            marks=(found.mark, *(each.mark for each in others), wide),
            steps=self._progress.done,
            unmet="" if met else unmet or "many errors add up, none of which is over the tolerance by itself",
            step_seconds=timed,
            low=asked.low,
        )

    def _everything(self) -> contextlib.AbstractContextManager:
        """Put every op that can be decided about in the low list; a user's own functions as they are listed."""
        own, names = self._asked.base.user_functions(), tuple(sorted(self._costs.names))
        low, wide = (tuple(name for name, rule in own.items() if rule is each) for each in (Rule.BF16, Rule.FP32))
        policy = Policy(bf16=(*names, *low), fp32=wide)
        if self._asked.low == "fp8":
            policy = Policy(low, wide, fp8=names, fp8_format=self._asked.base.fp8_format)
        return observed.observed(policy, self._asked.kernels, self._runs.sites)

    def _run_in_fp32(self) -> None:
        """Run all batches, and measure the calls of those to tune on."""
        costs, tuning = self._costs, len(self._runs.tuning)
        self._runs.prepare(lambda drawn, number: Look(drawn, costs, number) if number < tuning else Exact(drawn))
        if not costs.of_place:
            raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
        if math.isnan(self._runs.noise):
            raise HmpxError("tune: the batches are all alike, so there is no noise between them; give some that differ")

    def _remains_in_fp32(self) -> tuple[Effect, str]:
        """Return what remains with every op in the fp32 list; and where that is too much, what makes it, in words."""
        runs, wide = self._runs, self._mixed(Chosen())
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
        return worst, said if worst.size > self._asked.tolerance else ""

    def _measured(self, chosen: Chosen, batches: Sequence[int], enough: float = math.inf) -> Effect:
        return self._runs.effect(self._mixed(chosen), batches, "searching", enough)

    def _mixed(self, chosen: Chosen) -> Make:
        """Return a pass with these places in low precision."""
        costs = self._costs

        def is_low(site: Compared) -> bool | None:
            place = costs.place_of(site)
            return place in chosen if place in costs.of_place else None

        return lambda drawn: Mixed(drawn, is_low)

    def _of_choice(self, chosen: Chosen) -> Measured:
        """Return the lists and rules of a choice, measured."""
        if chosen not in self._verified:
            low, wide, modules = lists_and_rules([*self._costs.of_place], chosen, self._asked.low)
            policy = policy_of(self._asked.base, self._asked.low, low, wide)
            found = self._of_lists("tuned", policy, recipe_of(self._asked.recipe, policy, modules))
            self._verified[chosen] = found._replace(chosen=chosen)
        return self._verified[chosen]

    def _of_lists(self, name: str, policy: Policy, recipe: Recipe | None = None) -> Measured:
        """Run the held-out batches under lists."""
        asked, costs, runs = self._asked, self._costs, self._runs
        low: dict[Compared, bool] = {}
        with observed.observed(policy, asked.kernels, runs.sites, self._rules(recipe)):
            effect = runs.effect(lambda drawn: UnderLists(drawn, low, asked.low), runs.held_out, "verifying")
        ran = {is_low: {costs.place_of(site) for site in low if low[site] is is_low} for is_low in (True, False)}
        places = costs.free & (ran[True] - ran[False])
        if effect.raised:  # as the lists name the ops, for the run did not come to all of them
            places = frozenset(place for place in costs.of_place if place.name in getattr(policy, asked.low))
        mark = Mark(name, costs.of(places), effect.gradient_error, costs.share(places), effect.raised)
        return Measured(policy, recipe or Recipe(), effect, mark, places & costs.free)

    def _rules(self, recipe: Recipe | None) -> Sequence[ModuleRule]:
        return rules_for([self._subject.model], recipe) if recipe is not None else ()

    def _best(self, found: Measured) -> tuple[Measured, list[Measured]]:
        """Return the answer, and the known lists beside it; where one of these does less for as much, it decides."""
        asked = self._asked
        autocast = f"autocast-{'cuda' if self._subject.parameters[0].is_cuda else 'cpu'}"
        known = {"default lists": build_policy(), autocast: as_recipe(autocast).policy() or Policy()}
        if asked.low == "fp8":
            names = {place.name for place in self._costs.free}
            known = {"all in FP8": policy_of(asked.base, asked.low, names, ())}
        others = [self._of_lists(*each) for each in known.items()]
        for other in others:
            if self._is_better(other, found):
                again = self._of_choice(other.chosen)
                found = again if self._is_better(again, found) else found
        return found, others

    def _is_better(self, other: Measured, found: Measured) -> bool:
        """Return whether other lists do less, at no more than a small part of the gain."""
        slack = SLACK * max(self._costs.of(Chosen()) - found.mark.cost, 0.0)
        holds = other.effect.size <= self._asked.tolerance or found.effect.size > self._asked.tolerance
        return holds and other.effect.size < found.effect.size and other.mark.cost <= found.mark.cost + slack

    def _timed(self, found: Measured) -> tuple[Measured, str, tuple[float, float] | None]:
        """Time whole steps for "speed". Where FP32 is not slower, everything stays in FP32; the words say so."""
        if self._asked.objective != "speed" or not found.chosen:
            return found, "", None
        subject, batch = self._subject, self._subject.batches[self._runs.held_out[0]]
        with conversion.install(found.policy, kernels=self._asked.kernels, rules=self._rules(found.recipe)):
            low = seconds(lambda: subject.low(batch))
        with conversion.install(Policy(bf16=(), fp32=(), promote=()), kernels="native"):  # in the place of one in force
            wide = seconds(lambda: subject.wide(batch))
        if low < wide:
            return found, "", (low, wide)
        words = f"a step takes {amount(low, 's')} with the fastest lists that hold, and {amount(wide, 's')} in FP32"
        return self._of_choice(Chosen()), words, None
