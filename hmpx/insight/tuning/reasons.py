"""Why a name is in the list that it is in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from hmpx.insight.recording.words import short_places
from hmpx.insight.tuning.choice import Choice, percent
from hmpx.insight.tuning.costs import SLACK, Chosen, Costs, Unit
from hmpx.insight.tuning.effect import Effect
from hmpx.insight.tuning.look import Place, Site
from hmpx.insight.tuning.search import Search


class Reasons:
    """What `choices` tells of each name.

    low: the names that the lists have in BF16. failed: choices that did not hold on the held-out batches. slower: said
    of every name where the whole was not faster than FP32; "" elsewhere.
    """

    def __init__(
        self,
        costs: Costs,
        search: Search,
        chosen: Chosen,
        low: Collection[str],
        tolerance: float,
        unit: str,
        failed: Mapping[Chosen, Effect],
        slower: str,
    ) -> None:
        self._costs, self._search, self._chosen, self._low = costs, search, chosen, low
        self._tolerance, self._unit, self._failed, self._slower = tolerance, unit, failed, slower

    def choices(self) -> list[Choice]:
        """For each name, and each module in which it is otherwise: what is in FP32 first, the worst first."""
        found = [*self._choices()]
        return sorted(found, key=lambda each: (each.dtype != "float32", -each.budget, each.name, each.module))

    def _choices(self) -> Iterator[Choice]:
        for name in {place.name: None for place in self._costs.sites}:
            places = [place for place in self._costs.sites if place.name == name]
            usual = [place for place in places if (place in self._chosen) is (name in self._low)]
            yield self._choice(name, "", usual)
            for place in places:
                if place not in usual:
                    yield self._choice(name, place.module, [place])

    def _choice(self, name: str, module: str, places: list[Place]) -> Choice:
        effect, gain = self._alone(frozenset(places)), self._costs.gain(frozenset(places), self._chosen)
        budget = (effect.size / self._tolerance) ** 2 if self._tolerance else math.inf if effect.size else 0.0
        sites = [site for place in places for site in self._costs.sites[place]]
        worst = max(sites, key=lambda site: site.rounding)
        return Choice(
            name=name,
            module=module,
            dtype="bfloat16" if places[0] in self._chosen else "float32",
            gradient_error=effect.gradient_error,
            loss_change=effect.loss_change,
            loss_error=effect.loss_error,
            budget=budget,
            gain=gain,
            unit=self._unit,
            calls=sum(site.calls for site in sites),
            worst=_line(worst) if len(sites) > 1 or budget > 0.01 else "",
            why=self._why(frozenset(places), effect, budget, gain),
        )

    def _alone(self, places: Unit) -> Effect:
        """As it was measured; of what was not run as one, the errors of its parts, taken to be independent."""
        alone = self._search.alone
        if places in alone:
            return alone[places]
        least = [unit for unit in alone if unit & places and not any(other < unit for other in alone)]
        parts = [alone[unit] for unit in least]

        def root(figures: Iterable[float]) -> float:
            return math.sqrt(sum(figure * figure for figure in figures))

        return Effect(
            root(part.gradient_error for part in parts),
            root(part.gradient_bias for part in parts),
            root(part.loss_change for part in parts),
            root(part.loss_error for part in parts),
            next((part.raised for part in parts if part.raised), ""),
        )

    def _why(self, places: Unit, effect: Effect, budget: float, gain: float) -> str:
        pinned = next((self._costs.pinned[place] for place in places if place in self._costs.pinned), "")
        if pinned or places & self._chosen:
            return pinned or "fits"
        if effect.raised:
            return f"with it in BF16 the program raises {effect.raised}"
        if budget > 1:
            return "breaks the tolerance by itself"
        if self._slower:
            return self._slower
        if gain <= 0:
            return "BF16 saves nothing here"
        failed = [each for chosen, each in self._failed.items() if chosen & places]
        raised = next((each.raised for each in failed if each.raised), "")
        if raised:
            return f"with it in BF16 the program raises {raised}"
        if failed and places <= frozenset().union(*self._search.left):
            return f"with it in BF16 the error on held-out batches is {min(each.size for each in failed):.1e}"
        if places <= frozenset().union(*self._search.left):
            return "fits by itself, but not with the others"
        return f"saves under {percent(SLACK)} of what BF16 saves in all, and would add to the error"


def _line(site: Site) -> str:
    return short_places(", ".join(filter(None, (site.site.module, site.site.where))))
