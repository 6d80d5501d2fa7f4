"""The search: as much in BF16 as holds, by runs of each name alone, a ranking, and bisection.

1. Each unit (a list name, everywhere) runs alone in BF16 on one batch. Its harm is the square of the error.
2. Units are ranked by harm over what BF16 saves. Those that save next to nothing are left for the end.
3. If all of the others hold together, they are the choice. Else a unit that takes a large part of the tolerance is
   divided by module, outer blocks first, and its parts are ranked with the other units.
4. The longest beginning of the ranking that holds is found by bisection. The unit behind it is left out, and the search
   goes on behind that.
5. What was left out is tried again: in the place of units that save less, and by twos, for errors may cancel.
6. What saves next to nothing is added as far as it adds no error: this saves casts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from hmpx.insight.tuning.costs import SLACK, Chosen, Costs, Unit, usually_low
from hmpx.insight.tuning.effect import NOTHING, Effect
from hmpx.insight.tuning.look import Place

_LARGE = 0.25  # of the tolerance, as a square: a unit that takes more is divided by module
_PARTS = 8  # into which a unit is divided at once
_RETRIED = 3  # units that were left out and are tried again
_FAR = 2.0  # times the room that is left, as a square: a unit that takes more is not tried


class Measure(Protocol):
    """What a choice does to the batches, or to the first so many, with an early end where it exceeds `enough`."""

    def __call__(self, chosen: Chosen, first: int | None = None, enough: float = math.inf) -> Effect: ...


class Search:
    """One search.

    known: choices that were measured before, on all batches. alone: what each unit does alone in BF16. order: the units
    of the choice, as ranked. left: those that do not fit; small: those that save next to nothing.
    """

    def __init__(self, measure: Measure, costs: Costs, tolerance: float, known: Mapping[Chosen, Effect]) -> None:
        self._measure, self._costs, self._tolerance = measure, costs, tolerance
        self._known = {(chosen, math.inf): effect for chosen, effect in {frozenset(): NOTHING, **known}.items()}
        self._of_first: dict[Chosen, float] = {}
        self.alone: dict[Unit, Effect] = {}
        self.order: list[Unit] = []  # of the choice, what does least for its gain first
        self.left: list[Unit] = []
        self.small: list[Unit] = []

    def run(self, names: Sequence[Unit], wished: Chosen) -> Chosen:
        """The choice among names, where `wished` would cost least."""
        self._run_alone(names)
        wanted = self._ranked([unit for unit in names if unit <= wished], wished)
        worth = self._without_small(wanted, wished)
        chosen: Chosen = frozenset().union(*worth)
        if self.holds(chosen):
            self.order = worth
        else:
            worth = self._ranked(self._divided(worth), wished)
            chosen = self._retried(self._filled(worth))
        self.small = [unit for unit in names if not unit & frozenset().union(*worth, *self.left)]
        chosen = self._without_small_rules(chosen)
        chosen = self._with_harmless(chosen)
        self.order = [unit for unit in self.order if unit <= chosen]
        return chosen

    def harm(self, unit: Unit) -> float:
        """The square of the error of a unit alone; a unit that was not run alone has that of its parts."""
        if unit in self.alone:
            return self.alone[unit].size ** 2
        return sum(effect.size**2 for part, effect in self.alone.items() if part < unit)

    def effect(self, chosen: Chosen) -> Effect:
        """What a choice does to all batches."""
        return self._effect(chosen, math.inf)

    def knows(self, chosen: Chosen) -> bool:
        """Whether the effect of a choice on all batches was measured."""
        return (chosen, math.inf) in self._known

    def holds(self, chosen: Chosen, enough: float | None = None) -> bool:
        """Whether the error of a choice is within the tolerance, or within `enough`."""
        enough = self._tolerance if enough is None else enough
        return self._effect(chosen, enough).meets(enough)

    def measured(self) -> int:
        """How many choices were measured, those of single units among them."""
        return len({chosen for chosen, _ in self._known} | self._of_first.keys() | self.alone.keys()) - 1

    def dropped(self, chosen: Chosen, holds: Measure) -> Chosen:
        """As much of the choice, in the order of the ranking, as holds on other batches too."""
        rest = chosen - frozenset().union(*self.order)
        order = [*self.order, rest] if rest else self.order

        sizes: dict[int, float] = {}

        def fits(count: int) -> bool:
            sizes[count] = holds(frozenset().union(*order[:count]), enough=self._tolerance).size
            return sizes[count] <= self._tolerance

        count = len(order)
        if not fits(count):
            sums = [*itertools.accumulate(map(self.harm, order))]
            room = sums[-1] * (self._tolerance / sizes[count]) ** 2 if math.isfinite(sizes[count]) else 0.0
            count = _longest(0, count, fits, sum(each <= room for each in sums))
        self.left += order[count:]
        self.order = order[:count]
        return frozenset().union(*self.order)

    def _effect(self, chosen: Chosen, enough: float) -> Effect:
        whole = self._known.get((chosen, math.inf)) or self._known.get((chosen, enough))
        if whole is None:
            whole = self._known[chosen, enough] = self._measure(chosen, enough=enough)
            if whole.meets(enough):  # so it did not end early
                self._known[chosen, math.inf] = whole
        return whole

    def _run_alone(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit not in self.alone:
                self.alone[unit] = self._measure(unit, first=1)

    def _ranked(self, units: Sequence[Unit], wished: Chosen) -> list[Unit]:
        """Those that do least for what they save first; of two that do alike, the one with the smaller error."""
        key = {unit: self.harm(unit) / max(self._costs.gain(unit, wished), 1e-30) for unit in units}
        return sorted(units, key=lambda unit: (key[unit], self.harm(unit), sorted(unit)))

    def _without_small(self, ranked: list[Unit], wished: Chosen) -> list[Unit]:
        """Without what together saves next to nothing, by the most harm for it."""
        room = SLACK * (self._costs.of(frozenset()) - self._costs.of(wished))
        kept = []
        for unit in reversed(ranked):
            gain = self._costs.gain(unit, wished)
            if gain <= room and self.harm(unit) > 0:
                room -= gain
            else:
                kept.append(unit)
        return kept[::-1]

    def _divided(self, units: Iterable[Unit]) -> list[Unit]:
        """The units, those that take a large part of the tolerance in parts, outer blocks first."""
        found, rest = [], [*units]
        while rest:
            unit = rest.pop()
            if len(unit) == 1 or self.harm(unit) <= _LARGE * self._tolerance**2:
                found.append(unit)
            else:
                parts = parts_of(unit)
                self._run_alone(parts)
                rest += parts
        return found

    def _filled(self, order: list[Unit]) -> Chosen:
        """As much of a ranking as holds. What does not fit is left out, and the search goes on behind it."""
        chosen: Chosen = frozenset()
        while order:
            before = chosen

            def fits(count: int, before: Chosen = before, order: list[Unit] = order) -> bool:
                return self.holds(before.union(*order[:count]))

            room = self._room(chosen)
            sums = itertools.accumulate(self.harm(unit) for unit in order)
            predicted = sum(each <= room for each in sums)  # with errors that are independent
            count = len(order) if fits(len(order)) else _longest(0, len(order), fits, predicted)
            chosen = chosen.union(*order[:count])
            self.order += order[:count]
            self.left += order[count : count + 1]
            room, rest = self._room(chosen), order[count + 1 :]
            order = [unit for unit in rest if self.harm(unit) <= _FAR * room]
            self.left += [unit for unit in rest if unit not in order]
        return chosen

    def _room(self, chosen: Chosen) -> float:
        """What is left of the squared tolerance."""
        return self._tolerance**2 - self.effect(chosen).size ** 2

    def _retried(self, chosen: Chosen) -> Chosen:
        """With units that were left out: in the place of others that save less, and by twos."""
        finite = [unit for unit in self.left if math.isfinite(self.harm(unit))]
        by_gain = sorted(finite, key=lambda unit: -self._costs.gain(unit, chosen))[:_RETRIED]
        for added in [*((unit,) for unit in by_gain), *itertools.combinations(by_gain, 2)]:
            if any(unit <= chosen for unit in added):
                continue
            removed = self._in_the_place_of(added[0], chosen) if len(added) == 1 else []
            if removed is None:
                continue
            other = (chosen - frozenset().union(*removed)).union(*added)
            if self._costs.of(other) < self._costs.of(chosen) and self._may_hold(other, chosen) and self.holds(other):
                self.left = [unit for unit in [*self.left, *removed] if unit not in added]
                self.order = [unit for unit in self.order if unit not in removed] + [*added]
                chosen = other
        return chosen

    def _may_hold(self, other: Chosen, chosen: Chosen) -> bool:
        """Whether one batch promises it: where the error grows from the choice's to the other's as it does in all."""
        first, whole = self._first(chosen), self.effect(chosen).size
        return first == 0 or self._first(other) * whole / first <= self._tolerance

    def _first(self, chosen: Chosen) -> float:
        """The error of the first batch."""
        if chosen not in self._of_first:
            self._of_first[chosen] = self._measure(chosen, first=1).size
        return self._of_first[chosen]

    def _in_the_place_of(self, unit: Unit, chosen: Chosen) -> list[Unit] | None:
        """The units that would make room for another one, and together save less than it does; None if none do."""
        gain, room = self._costs.gain(unit, chosen), self._room(chosen) - self.harm(unit)
        removed: list[Unit] = []
        for other in sorted(self.order, key=self.harm, reverse=True):
            if room >= 0:
                break
            if self._costs.gain(other, chosen) < gain:
                removed.append(other)
                gain -= self._costs.gain(other, chosen)
                room += self.harm(other)
        return removed if removed and room >= 0 else None

    def _without_small_rules(self, chosen: Chosen) -> Chosen:
        """Without single modules in BF16 of names that are mostly FP32, where these save next to nothing together."""
        room = SLACK * (self._costs.of(frozenset()) - self._costs.of(chosen))
        low = usually_low(self._costs.sites, chosen)
        alone = [frozenset({place}) for place in chosen if place.module and not low[place.name]]
        for unit in sorted(alone, key=lambda unit: (self._costs.gain(unit, chosen), sorted(unit))):
            gain = self._costs.gain(unit, chosen)
            if gain > room:
                break
            room -= max(gain, 0.0)
            chosen -= unit
            self.left = [each - unit for each in self.left if each - unit] + [unit]
            self.order = [each - unit for each in self.order if each - unit]
        return chosen

    def _with_harmless(self, chosen: Chosen) -> Chosen:
        """With those units that save next to nothing, as far as they add next to no error."""
        if not chosen:
            return chosen
        enough = (1 + SLACK) * self._first(chosen)
        order = sorted(self.small, key=lambda unit: (self.harm(unit), sorted(unit)))
        order = [unit for unit in order if self._costs.gain(unit, chosen) >= 0 and math.isfinite(self.harm(unit))]

        def fits(count: int) -> bool:
            return self._first(chosen.union(*order[:count])) <= enough

        count = _longest(0, len(order) + 1, fits, len(order))
        larger = chosen.union(*order[:count])
        enough = min(self._tolerance, (1 + SLACK) * self.effect(chosen).size)
        if not count or not self.holds(larger, enough):
            return chosen
        self.order += order[:count]
        self.small = [unit for unit in self.small if unit not in order[:count]]
        return larger


def _longest(few: int, many: int, fits: Callable[[int], bool], guess: int) -> int:
    """The largest count that fits, between one that does and one that does not: in growing steps from a guess."""
    step = 1
    while many - few > 1:
        middle = min(max(guess, few + 1), many - 1)
        if fits(middle):
            few, guess = middle, middle + step
        else:
            many, guess = middle, middle - step
        step *= 2
    return few


def parts_of(unit: Unit) -> list[Unit]:
    """A unit divided by the outermost blocks in which its modules differ; neighbours together where there are many."""
    places = sorted(unit, key=lambda place: _key(place.module))
    blocks: dict[tuple[str, ...], list[Place]] = {}
    depth = 0
    while len(blocks) < 2:  # it ends: no two places of a name have one module
        depth += 1
        blocks = {}
        for place in places:
            blocks.setdefault(tuple(place.module.split(".")[:depth]), []).append(place)
    groups = [*blocks.values()]
    size = math.ceil(len(groups) / _PARTS)
    return [frozenset(itertools.chain(*groups[i : i + size])) for i in range(0, len(groups), size)]


def _key(module: str) -> tuple:
    """So that block 10 stands behind block 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in module.split("."))
