"""Why a name is in the list that it is in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from hmpx.insight.text_table import short_places
from hmpx.insight.tuning.choice import Choice, percent
from hmpx.insight.tuning.costs import SLACK, Chosen, Costs, NameInModule, Unit
from hmpx.insight.tuning.runs import Effect
from hmpx.insight.tuning.search import Search


class Reasons:
    """What the search tells of each name. failed: choices that did not hold on the held-out batches."""

    def __init__(
        self, costs: Costs, search: Search, tolerance: float, unit: str, failed: Mapping[Chosen, Effect]
    ) -> None:
        self._costs, self.search, self._tolerance, self._unit, self._failed = costs, search, tolerance, unit, failed

    def choices(self, chosen: Chosen, low: Collection[str], slower: str) -> list[Choice]:
        """For each name, and each module in which it is otherwise: what is in FP32 first, the worst first.

        low: the names that the low list has. slower: said of every name where the whole was not faster than FP32.
        """
        found, wide = [*self._choices(chosen, low, slower)], self._costs.level.wide_dtype
        return sorted(found, key=lambda each: (each.dtype != wide, _order(each), each.name, each.module))

    def _choices(self, chosen: Chosen, low: Collection[str], slower: str) -> Iterator[Choice]:
        for name in {place.name: None for place in self._costs.of_place}:
            places = [place for place in self._costs.of_place if place.name == name]
            usual = [place for place in places if (place in chosen) is (name in low)]
            yield self._choice(name, "", usual, chosen, slower)
            for place in places:
                if place not in usual:
                    yield self._choice(name, place.module, [place], chosen, slower)

    def _choice(self, name: str, module: str, places: list[NameInModule], chosen: Chosen, slower: str) -> Choice:
        unit, costs = frozenset(places), [self._costs.of_place[place] for place in places]
        effect, gain = self._alone(unit), self._costs.gain(unit, chosen)
        lines = [(place.module, line) for place, cost in zip(places, costs, strict=True) for line in cost.lines]
        where = short_places(", ".join(filter(None, lines[0])))
        return Choice(
            name=name,
            module=module,
            dtype=self._costs.level.low_dtype if unit & chosen else self._costs.level.wide_dtype,
            gradient_error=effect.gradient_error,
            loss_change=effect.loss_change,
            loss_error=effect.loss_error,
            gain=gain,
            unit=self._unit,
            calls=sum(cost.calls for cost in costs),
            where=where if len(lines) == 1 else f"{where} and {len(lines) - 1} more",
            why=self._why(unit, chosen, effect, gain, slower),
            low=self._costs.level.words,
        )

    def _alone(self, places: Unit) -> Effect:
        """As it was measured; of what was not run as one, the errors of its parts, taken to be independent."""
        alone = self.search.alone
        if places in alone:
            return alone[places]
        parts = [alone[unit] for unit in alone if unit & places and not any(other < unit for other in alone)]
        if not parts:
            return Effect(*(math.nan,) * 4)
        error, bias, change, loss = (
            math.hypot(*figures)
            for figures in zip(
                *((p.gradient_error, p.gradient_bias, p.loss_change, p.loss_error) for p in parts), strict=True
            )
        )
        return Effect(error, bias, change, loss, next((part.raised for part in parts if part.raised), ""))

    def _why(self, places: Unit, chosen: Chosen, effect: Effect, gain: float, slower: str) -> str:
        """What decided; of places of which some cannot be otherwise, what decided about the others, and why not."""
        free = places & self._costs.free
        pinned = next((cost.pinned for place in places if (cost := self._costs.of_place[place]).pinned), "")
        if not free:
            return pinned
        why = self._why_of(free, chosen, effect, gain, slower)
        return f"{why}; elsewhere {pinned}" if pinned else why

    def _why_of(self, places: Unit, chosen: Chosen, effect: Effect, gain: float, slower: str) -> str:
        if places & chosen:
            return "fits"
        low = self._costs.level.words
        failed = [each for tried, each in self._failed.items() if tried & places]
        raised = effect.raised or next((each.raised for each in failed if each.raised), "")
        if raised:
            return f"with it in {low} the program raises {raised}"
        if effect.size > self._tolerance and not math.isnan(effect.gradient_error):
            return "breaks the tolerance by itself"
        if slower:
            return slower
        if gain <= 0:
            return f"{low} saves nothing here"
        left = Chosen().union(*self.search.left)
        if failed and places <= left:
            return f"with it in {low} the error on held-out batches is {min(each.size for each in failed):.2g}"
        if places <= left:
            return "fits by itself, but not with the others"
        return f"saves under {percent(SLACK)} of what {low} saves in all, and would add to the error"


def _order(choice: Choice) -> tuple[float, float]:
    """The largest error first; what was not run alone by what it saves."""
    error = max(choice.gradient_error, choice.loss_error)
    return (math.inf if math.isnan(error) else -error), -choice.gain
