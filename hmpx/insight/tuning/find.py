"""Finds lists: FP32 runs, the search, and the lists measured on held-out batches, as they will be used."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.utils.benchmark import Timer

from hmpx import conversion
from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.trials.calls import Asked, CallSite, Compute, by_site, exactly, in_its_inputs_dtype
from hmpx.insight.trials.runs import Effect, Progress, Runs
from hmpx.insight.trials.search import Search
from hmpx.insight.trials.subject import Subject
from hmpx.insight.tuning.choices import choices_of, lists_and_rules, policy_of, recipe_of
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import Chosen, Low, Weighing, Worths, words_of
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.recipes.module_patterns import module_names, rules_for
from hmpx.recipes.recipe import Recipe

_LEAST = 0.1  # seconds for which a step is timed


class Measured(NamedTuple):
    """The lists of a choice, and what they do to the held-out batches."""

    policy: Policy
    recipe: Recipe
    effect: Effect


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
    low: Low
    tolerance: float

    def __post_init__(self) -> None:
        self._runs = Runs(self.subject, self.progress, loss_counts=True)
        self._searched, self._held_out = [*range(self.tuning)], [*range(self.tuning, len(self.subject.batches))]
        self._worths = Worths(self.low, module_names(self.subject.model, all_names=True), words_of(self.low, self.base))
        self._verified: dict[Chosen, Measured] = {}

    def run(self) -> Tuned:
        """Find the lists, measure them, and time a step under them."""
        worths, runs = self._worths, self._runs
        with self._everything():
            for number in (*self._searched, *self._held_out):
                if not runs.exact(number, Weighing(worths, number) if number < self.tuning else exactly):
                    raise HmpxError(f"tune: {self._not_finite(number)}")
            runs.find_noise()
            if not worths.of_place:
                raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
            if math.isnan(runs.noise):
                raise HmpxError(
                    "tune: the batches are all alike, so there is no noise between them; give some that differ"
                )
            nothing, unmet = self._remains_in_fp32()
            # Where more remains than is allowed, the choice may add as much as is allowed.
            remains = nothing.size if self.tolerance < nothing.size < math.inf else 0.0
            tolerance = math.hypot(self.tolerance, remains)
            search = Search(self._measured, self._searched, tolerance, nothing, worths.gain)
            names = sorted({place.name for place in worths.free})
            units = [frozenset(place for place in worths.free if place.name == name) for name in names]
            chosen = search.run(units, worths.wished(units))
        if self._of_choice(chosen).effect.size > tolerance:
            with self._everything():
                chosen = search.dropped(chosen, lambda some: self._of_choice(some).effect.size)
        failed = {some: each.effect for some, each in self._verified.items() if each.effect.size > tolerance}
        policy, recipe, effect = self._of_choice(chosen)
        predicted = search.effect(chosen)
        met = max(effect.size, predicted.size) <= self.tolerance
        if effect.raised:
            unmet = f"under these lists the program raises {effect.raised}"
        return Tuned(
            policy=policy,
            recipe=recipe,
            met=met,
            gradient_error=effect.gradient_error,
            gradient_bias=effect.gradient_bias,
            loss_change=effect.loss_change,
            loss_error=effect.loss_error,
            predicted=predicted.gradient_error,
            share=worths.share(chosen),
            tolerance=self.tolerance,
            choices=tuple(choices_of(worths, search, self.tolerance, failed, chosen, getattr(policy, self.low))),
            steps=self.progress.done,
            step_seconds=self._timed(policy, recipe) if chosen and not effect.raised else {},
            unmet="" if met else unmet or "many errors add up, none of which is over the tolerance by itself",
            low=self.low,
        )

    def _everything(self) -> contextlib.AbstractContextManager:
        """Put every op that can be decided about in the low list; a user's own functions as they are listed."""
        own, names = self.base.user_functions(), tuple(sorted(self._worths.names))
        low, wide = (tuple(name for name, rule in own.items() if rule is each) for each in (Rule.BF16, Rule.FP32))
        policy = Policy(bf16=(*names, *low), fp32=wide)
        if self.low == "fp8":
            policy = Policy(low, wide, fp8=names, fp8_format=self.base.fp8_format)
        return observed.observed(policy, self.kernels, self._runs)

    def _not_finite(self, number: int) -> str:
        """Return the words for a batch of which the loss or a gradient is not finite in FP32."""
        held_out, loss = number - self.tuning, self._runs.losses[number]
        what = f"batch {number}" if held_out < 0 else f"held-out batch {held_out}"
        if not math.isfinite(loss):
            return f"the loss of {what} is {loss} in FP32 already, so there is nothing to compare BF16 with"
        return f"the gradients of {what} are not finite in FP32 already; its loss is {loss:g}"

    def _remains_in_fp32(self) -> tuple[Effect, str]:
        """Return what remains with every op in the fp32 list; and where that is too much, what makes it, in words."""
        runs = self._runs
        if not self._measured(Chosen(), self._searched[:1]).size:
            return Effect(), ""
        runs.check_repeats()
        found = [self._measured(Chosen(), batches) for batches in (self._searched, self._held_out)]
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
        worths = self._worths

        def compute_of(site: CallSite) -> Compute:
            place = worths.place_of(site)
            if place not in worths.of_place:
                return in_its_inputs_dtype
            return Asked.plainly if place in chosen else exactly

        return self._runs.effect(by_site(compute_of), batches, "searching", enough)

    def _of_choice(self, chosen: Chosen) -> Measured:
        """Return the lists and rules of a choice, measured on the held-out batches."""
        if chosen not in self._verified:
            low, wide, modules = lists_and_rules([*self._worths.of_place], chosen, self.low)
            policy = policy_of(self.base, self.low, low, wide)
            recipe = recipe_of(self.recipe, policy, modules)
            rules = rules_for([self.subject.model], recipe)
            with observed.observed(policy, self.kernels, self._runs, rules):
                effect = self._runs.effect(Asked.plainly, self._held_out, "verifying")
            self._verified[chosen] = Measured(policy, recipe, effect)
        return self._verified[chosen]

    def _timed(self, policy: Policy, recipe: Recipe) -> dict[str, float]:
        """Return the seconds of a step under the lists, in plain FP32, and under torch.autocast; NaN if that raises."""
        subject, batch = self.subject, self.subject.batches[self._held_out[0]]
        with conversion.install(policy, kernels=self.kernels, rules=rules_for([subject.model], recipe)):
            found = {"tuned": seconds(lambda: subject.low(batch))}
        device, loss = subject.parameters[0].device.type, subject.loss
        with conversion.install(Policy(bf16=(), fp32=(), promote=()), kernels="native"):  # in the place of one in force
            found["FP32"] = seconds(lambda: subject.wide(batch))
            try:
                subject.loss = torch.autocast(device, torch.bfloat16)(loss)
                found["torch.autocast"] = seconds(lambda: subject.wide(batch))
            except Exception:  # a program that autocast does not run is still tuned
                found["torch.autocast"] = math.nan
            finally:
                subject.loss = loss
        return found


def seconds(work: Callable[[], object]) -> float:
    """Return the time of `work`, the least of some rounds: other programs only make rounds longer."""
    work()
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_LEAST).times)
