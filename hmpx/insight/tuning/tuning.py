"""One tuning: FP32 runs, the search, the held-out batches."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from hmpx.errors import HmpxError
from hmpx.insight import observed
from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.tuning.batches import Batches, Runs, check_finite
from hmpx.insight.tuning.costs import Chosen, Costs
from hmpx.insight.tuning.effect import NOTHING, Effect
from hmpx.insight.tuning.look import Looked, Place, decidable
from hmpx.insight.tuning.passes import Drawn, Exact, Mixed
from hmpx.insight.tuning.progress import Progress
from hmpx.insight.tuning.result import Asked, Outcome, result
from hmpx.insight.tuning.search import Search
from hmpx.insight.tuning.tuned import Tuned
from hmpx.ops.policy import Policy, Rule
from hmpx.recipes.module_patterns import module_names


class Tuning:
    """One tuning while it is made."""

    def __init__(self, subject: Subject, batches: list[tuple], held_out: list[tuple], asked: Asked) -> None:
        self._subject, self._asked, self._sites = subject, asked, Sites()
        self._progress = Progress(3 * (len(batches) + len(held_out)) + 30, asked.progress)
        self._runs = Runs(subject, self._sites, self._progress.step)
        self._tuning = Batches(self._runs, batches, "batch")
        self._held_out = Batches(self._runs, held_out, "held-out batch")
        modules = {*module_names(subject.model, all_names=True)}
        self._looked = Looked(
            asked.objective, lambda site: Place(site.op, site.module if site.module in modules else "")
        )

    def run(self) -> Tuned:
        try:
            with observed.observed(self._everything(), self._asked.kernels, self._sites):
                self._run_in_fp32()
                outcome = self._chosen()
                outcome.search.effect(outcome.chosen)
            return result(outcome, self._asked)
        finally:
            self._progress.end()

    def _everything(self) -> Policy:
        """Every op that can be decided about in the bf16 list; a user's own functions as they are listed."""
        own = self._asked.base.user_functions()
        low = [name for name, rule in own.items() if rule is Rule.BF16]
        return Policy(
            bf16=(*sorted(decidable()), *low), fp32=tuple(name for name, rule in own.items() if rule is Rule.FP32)
        )

    def _run_in_fp32(self) -> None:
        """All batches, with a look at the calls of those to tune on."""
        first = self._subject.batches[0]
        exact = self._runs.run(Exact({}), lambda: self._subject.wide(first, False), "FP32")[0]
        check_finite(exact, (), "batch 0")
        self._tuning.prepare(self._looked.begin)
        self._subject.check_repeats(self._tuning.losses[0], exact)
        if not self._looked.sites:
            raise HmpxError("tune: nothing to choose from: the model calls no op that a list could name")
        if math.isnan(self._tuning.noise):
            raise HmpxError("tune: the batches are all alike, so there is no noise between them; give some that differ")
        self._held_out.prepare()
        if math.isnan(self._held_out.noise):
            raise HmpxError("tune: the held-out batches are all alike, so there is no noise between them; give others")
        # The noise of losses is that between all batches: two that are held out may happen to have nearly one loss.
        loss_noise = statistics.stdev([*self._tuning.losses, *self._held_out.losses]) or math.inf
        self._tuning.loss_noise = self._held_out.loss_noise = loss_noise

    def _chosen(self) -> Outcome:
        """The search, and what of its choice holds on the held-out batches."""
        costs = Costs(self._looked.sites.values(), self._asked.objective, self._subject.parameters[0].device)
        names = [
            frozenset(place for place in costs.free if place.name == name)
            for name in sorted({place.name for place in costs.free})
        ]
        wished = costs.cheapest(names)
        self._progress.expect(len(names) + 2 * len(self._tuning.batches) + 6 * len(self._held_out.batches) + 2)
        known, unmet, tolerance = self._in_fp32_as_listed()
        if wished:
            known[wished] = self._tuning.worst_first(self._mixed(wished), "searching")

        def measured(chosen: Chosen, first: int | None = None, enough: float = math.inf) -> Effect:
            return self._tuning.effect(self._mixed(chosen), "searching", first, enough)

        failed: dict[Chosen, Effect] = {}

        def held(chosen: Chosen, first: int | None = None, enough: float = math.inf) -> Effect:
            effect = self._held_out.effect(self._mixed(chosen), "verifying", first, enough)
            if not effect.meets(tolerance):
                failed[chosen] = effect
            return effect

        def predicted(chosen: Chosen) -> Effect:
            if search.knows(chosen):
                return search.effect(chosen)
            with observed.observed(self._everything(), self._asked.kernels, self._sites):
                return search.effect(chosen)

        search = Search(measured, costs, tolerance, known)
        chosen = search.dropped(search.run(names, wished), held)
        return Outcome(
            costs=costs,
            search=search,
            chosen=chosen,
            failed=failed,
            unmet=unmet,
            predicted=predicted,
            runs=self._runs,
            held_out=self._held_out,
        )

    def _in_fp32_as_listed(self) -> tuple[dict[Chosen, Effect], str, float]:
        """What every op in the fp32 list does; what stands in the way, in words; the tolerance, widened by that."""
        tolerance, none = self._asked.tolerance, Chosen()
        make = self._mixed(none)
        if self._tuning.effect(make, "searching", 1) == NOTHING:
            return {}, "", tolerance
        effect = self._tuning.effect(make, "searching")
        if effect.meets(tolerance):
            return {none: effect}, "", tolerance
        if effect.raised:
            return {none: effect}, f"with every op in FP32 the program raises {effect.raised}", tolerance
        held = self._held_out.effect(make, "verifying")
        lines = ", ".join(self._runs.by_hand)
        what = f"casts that the program makes itself, at {lines}" if lines else "ops that no wrapper reaches"
        if self._asked.recipe is not None and self._asked.recipe.parameter_dtype == "bfloat16":
            what = f"the weights, which the recipe has in BF16, nor about {what}" if lines else "the weights in BF16"
        said = (
            f"with every op in FP32 the gradient error is {held.gradient_error:.1e} already: lists do not decide about "
            f"{what}"
        )
        return {none: effect}, said, math.hypot(tolerance, max(effect.size, held.size))

    def _mixed(self, chosen: Chosen) -> Callable[[Drawn], Mixed]:
        """A run with these places in BF16."""

        def is_low(site: Compared) -> bool | None:
            found = self._looked.sites.get(site)
            return None if found is None else found.place in chosen

        return lambda drawn: Mixed(drawn, is_low)
