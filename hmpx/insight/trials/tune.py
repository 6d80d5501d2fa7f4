"""`tune`: checks what it is asked for, runs FP32 and the search, and measures the lists on held-out batches."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Measurement, Timer

from hmpx.base import region_state
from hmpx.base.tensors import dtype_name
from hmpx.conversion import Conversion, install
from hmpx.errors import HmpxError, did_you_mean
from hmpx.insight.tensors import LOW
from hmpx.insight.trials.calls import Asked, Compute, RunSite, by_site, compute_in_fp32, compute_uncast
from hmpx.insight.trials.runs import Effect, Progress, Runs, observed
from hmpx.insight.trials.search import LOWS, Chosen, Low, Search, Worths, words_of
from hmpx.insight.trials.subject import Loss, Subject, arguments_of, lists_meant
from hmpx.insight.trials.tuned import STEADY, Tuned, choices_of, lists_and_rules, policy_of, recipe_of
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.module_rules import rules_of
from hmpx.ops.policies.fp8_format import FORMATS
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.recipes.module_patterns import module_names, rules_for
from hmpx.recipes.recipe import Recipe

_LEAST = 2  # batches to tune on at least, and as many to hold out


def tune(
    model: torch.nn.Module,
    batches: Sequence[tuple],
    loss: Loss,
    *,
    low: Low | str = "bf16",
    tolerance: float = 0.1,
    held_out: Sequence[tuple] | None = None,
    lists: Policy | Recipe | Mapping[str, Any] | str | None = None,
    progress: bool = True,
) -> Tuned:
    """Find the op lists of a model: as many FLOPs of matrix products in BF16 as the training bears.

    If all products hold together in BF16, that is the answer. Else each list name alone runs in BF16, and the change of
    the gradients is measured beside FP32. Names are ranked by harm for their FLOPs, a harmful name is divided by
    module, and the longest beginning of the ranking that holds is found. The lists are verified on batches that took no
    part in the search. Last, a step is timed under them, in plain FP32, and under torch.autocast.

    Args:
        model: in FP32. It is as it was afterwards: parameters, gradients, buffers, random number generators.
        batches: a list of tuples or lists of positional arguments, as a DataLoader gives them; at least four, or two
            beside `held_out`. A batch of one argument that is a list of tensors is written ``([...],)``. The FP32
            gradients of all batches are kept in memory.
        loss: called as ``loss(model, *batch)``, returns a scalar tensor.
        low: "bf16" chooses between BF16 and FP32; "fp8" between FP8 and BF16: which modules may multiply in FP8, in the
            `fp8_format` of `lists`, and what cannot or may not is in BF16. The name of a format ("nvfp4") is "fp8" with
            that one.
        tolerance: the gradient error that is allowed, in units of the noise between batches, see `Comparison`. The part
            of it that is the same in every batch may be half of that. The loss may change by as much of the noise
            between the losses of batches.
        held_out: batches to verify on; None takes the last third of `batches`.
        lists: where to begin, as for `compare`: they decide about what the model does not call.
        progress: show on standard error how far it is; one line at the end where that is no terminal.

    Raises:
        HmpxError: something above does not fit; the model has rules (`policy_for`) or `casts` is open around; the loss
            is not finite in FP32; the loss in FP32 is another one when it is computed again.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> tuned = hmpx.tune(model, batches, loss, progress=False)
        >>> "linear" in tuned.policy.bf16, tuned.met
        (True, True)
    """
    if low not in LOWS:
        raise HmpxError(f"tune: low {low!r} does not exist (legal: {', '.join(LOWS)}){did_you_mean(str(low), LOWS)}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise HmpxError(f"tune: tolerance={tolerance!r} is no gradient error, in units of the noise between batches")
    policy, recipe, kernels = lists_meant(lists, "tune")
    if policy.low_precision is not torch.bfloat16:
        said = f"tune: low_precision is {dtype_name(policy.low_precision)}, and what is tried runs in BF16"
        raise HmpxError(f"{said}: leave it out; hmpx.compare measures lists in it")
    if low in FORMATS:
        policy = replace(policy, fp8_format=FORMATS[low])
    side: Low = "bf16" if low == "bf16" else "fp8"
    if recipe is not None and recipe.modules:
        raise HmpxError("tune: the recipe has rules for modules already, which tune is to find: leave `modules` out")
    subject = Subject(model, batches, loss, recipe, "tune")
    _check_nothing_around(model)
    given = subject.batches
    tuning = len(given)
    if held_out is None:
        tuning -= max(_LEAST, tuning // 3)
    else:
        subject.batches = [*given, *arguments_of(held_out, "held_out", "tune")]
    if min(tuning, len(subject.batches) - tuning) < _LEAST:
        beside = "" if held_out is None else f" and {len(held_out)} held out"
        raise HmpxError(
            f"tune: {len(given)} batch{'es' if len(given) > 1 else ''}{beside}: the noise between batches is the scale "
            "of every error, and takes two to tune on and two to verify on; give four or more that differ"
        )
    _check_in_fp32(model)
    with subject.opened(), Progress("tune", progress) as counted:
        return Tuning(subject, tuning, counted, policy, recipe, kernels, side, float(tolerance)).run()


def _check_in_fp32(model: torch.nn.Module) -> None:
    for name, p in model.named_parameters():
        if p.dtype in LOW or p.dtype is torch.float64:
            raise HmpxError(
                f"tune: parameter {name!r} is {dtype_name(p.dtype)}; it begins with a model in FP32: model.float(), or "
                "the model as it is made"
            )


def _check_nothing_around(model: torch.nn.Module) -> None:
    """Check that neither a module's rule nor a region around the call overrides the lists that are tried."""
    for name, module in model.named_modules():
        rule = next((rule for _, rule in rules_of(module) if rule.active), None)
        if rule is not None:
            raise HmpxError(
                f"tune: module {name!r} has a rule ({rule.where}), which tune is to find: remove() it, or leave the "
                "recipe that brings it"
            )
    if region_state.scope() or region_state.innermost().casting is False:
        region = "casts(...)" if region_state.scope() else "disable_casts()"
        raise HmpxError(
            f"tune: {region} is open around it, and would decide in the place of the lists: call it outside"
        )


_TIMED = 0.1, 0.3  # seconds to time a step: at least, and at most if timings vary; a long step runs twice at least


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
                if not runs.exact(number, worths.weighing(number) if number < self.tuning else compute_in_fp32):
                    raise HmpxError(f"tune: {self._not_finite(number)}")
            runs.find_noise()
            if not worths.of_place:
                raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
            if math.isnan(runs.noise):
                raise HmpxError(
                    "tune: the batches are all alike, so there is no noise between them; give some that differ"
                )
            nothing, unmet = self._remains_in_fp32()
            # If the error with all ops in FP32 is over the tolerance, a choice may add as much as the tolerance to it.
            remains = nothing.size if self.tolerance < nothing.size < math.inf else 0.0
            tolerance = math.hypot(self.tolerance, remains)
            search = Search(self._measured, self._searched, tolerance, nothing, worths.gain)
            names = sorted({place.name for place in worths.free})
            units = [frozenset(place for place in worths.free if place.name == name) for name in names]
            chosen = search.run(units, worths.wished(units))
            runs.check_repeats()
        if self._of_choice(chosen).effect.size > tolerance:
            with self._everything():
                chosen = search.dropped(chosen, lambda some: self._of_choice(some).effect.size)
        failed = {some: each.effect for some, each in self._verified.items() if each.effect.size > tolerance}
        policy, recipe, effect = self._of_choice(chosen)
        predicted = search.effect(chosen)
        timings = self._timed(policy, recipe) if chosen and not effect.raised else {}
        met = max(effect.size, predicted.size) <= self.tolerance
        if effect.raised:
            unmet = f"under these lists the program raises {effect.raised}"
        return Tuned(
            policy=policy,
            recipe=recipe,
            met=met,
            gradient_error=effect.gradient_error,
            gradient_bias=effect.gradient_bias,
            part_error=effect.part_error,
            part=effect.part,
            loss_change=effect.loss_change,
            loss_error=effect.loss_error,
            predicted=predicted.gradient_error,
            share=worths.share(chosen),
            tolerance=self.tolerance,
            choices=tuple(choices_of(worths, search, self.tolerance, failed, chosen, getattr(policy, self.low))),
            steps=self.progress.done,
            step_seconds={name: min(each.times) if each else math.nan for name, each in timings.items()},
            step_spread=max((each.iqr / each.median for each in timings.values() if each), default=0.0),
            unmet="" if met else unmet or "many errors add up, none of which is over the tolerance by itself",
            low=self.low,
        )

    def _everything(self) -> contextlib.AbstractContextManager:
        """Put every op that is decided about in the low list. A user's own functions stay as listed."""
        own, names = self.base.user_functions(), tuple(sorted(self._worths.names))
        low, wide = (tuple(name for name, rule in own.items() if rule is each) for each in (Rule.BF16, Rule.FP32))
        policy = Policy(bf16=(*names, *low), fp32=wide)
        if self.low == "fp8":
            policy = Policy(low, wide, fp8=names, fp8_format=self.base.fp8_format)
        return observed(policy, self.kernels, self._runs)

    def _not_finite(self, number: int) -> str:
        """Return the words for a batch of which the loss or a gradient is not finite in FP32."""
        held_out, loss = number - self.tuning, self._runs.losses[number]
        what = f"batch {number}" if held_out < 0 else f"held-out batch {held_out}"
        if not math.isfinite(loss):
            return f"the loss of {what} is {loss} in FP32 already, so there is nothing to compare BF16 with"
        return f"the gradients of {what} are not finite in FP32 already; its loss is {loss:g}"

    def _remains_in_fp32(self) -> tuple[Effect, str]:
        """Return the error that remains with every op in FP32. If it is over the tolerance, say what makes it."""
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
        """Return how some batches change if these places are in low precision."""
        worths = self._worths

        def compute_of(site: RunSite) -> Compute:
            place = worths.place_of(site)
            if place not in worths.of_place:
                return compute_uncast
            return Asked.plainly if place in chosen else compute_in_fp32

        return self._runs.effect(by_site(compute_of), batches, "searching", enough)

    def _of_choice(self, chosen: Chosen) -> Measured:
        """Return the lists and rules of a choice, measured on the held-out batches."""
        if chosen not in self._verified:
            low, wide, modules = lists_and_rules([*self._worths.of_place], chosen, self.low)
            policy = policy_of(self.base, self.low, low, wide)
            recipe = recipe_of(self.recipe, policy, modules)
            rules = rules_for([self.subject.model], recipe)
            with observed(policy, self.kernels, self._runs, rules):
                effect = self._runs.effect(Asked.plainly, self._held_out, "verifying")
            self._verified[chosen] = Measured(policy, recipe, effect)
        return self._verified[chosen]

    def _timed(self, policy: Policy, recipe: Recipe) -> dict[str, Measurement | None]:
        """Time a step under the lists, in plain FP32, and under torch.autocast; None if that raises."""
        subject, batch = self.subject, self.subject.batches[self._held_out[0]]
        with install(Conversion(policy, kernels=self.kernels, rules=rules_for([subject.model], recipe))):
            found: dict[str, Measurement | None] = {"tuned": timed(lambda: subject.low(batch))}
        device, loss = subject.parameters[0].device.type, subject.loss
        with install(Conversion(Policy(bf16=(), fp32=(), promote=()), kernels="native")):  # instead of one in force
            found["FP32"] = timed(lambda: subject.wide(batch))
            try:
                subject.loss = torch.autocast(device, torch.bfloat16)(loss)
                found["torch.autocast"] = timed(lambda: subject.wide(batch))
            except Exception:  # a program that fails under autocast is still tuned
                found["torch.autocast"] = None
            finally:
                subject.loss = loss
        return found


def timed(work: Callable[[], object]) -> Measurement:
    """Time `work` in rounds. The caller takes the shortest, as other programs only make rounds longer."""
    began = perf_counter()
    work()
    least, most = _TIMED[0], max(_TIMED[1], 2 * (perf_counter() - began))
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return timer.adaptive_autorange(STEADY, min_run_time=least, max_run_time=most)
