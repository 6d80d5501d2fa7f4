"""The search: as much in BF16 as holds.

1. Everything that saves something is measured together. If it holds, the search is over but for step 5.
2. Else each unit (a list name, everywhere) runs alone in BF16 on one batch. Its harm is the square of the error. Units
   are ranked by harm over what BF16 saves; one that takes a large part of the tolerance is divided by module, outer
   blocks first.
3. The longest beginning of the ranking that holds is found by bisection. The unit behind it is left out, and the search
   goes on behind that.
4. What was left out is tried again: in the place of units that save less, and by twos, for errors may cancel.
5. What saves next to nothing is added if the error does not grow: this saves casts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hmpx.insight.tuning.costs import SLACK, Chosen, Costs, NameInModule, Unit
from hmpx.insight.tuning.runs import Effect

_LARGE = 0.25  # of the tolerance, as a square: a unit that takes more is divided by module
_PARTS = 8  # into which a unit is divided at once
_RETRIED = 3  # units that were left out and are tried again
_FAR = 2.0  # times the room that is left, as a square: a unit that takes more is not tried


class Measure(Protocol):
    """What a choice does to the batches, or to the first so many, with an early end where it exceeds `enough`."""

    def __call__(self, chosen: Chosen, first: int | None = None, enough: float = math.inf) -> Effect: ...


class Search:
    """One search.

    measured: what choices do to all batches; one that does not hold may have been measured on fewer. alone: what units
    do alone in BF16 to the first batch. order: the units of the choice, what does least for its gain first. left: those
    that do not fit.
    """

    def __init__(self, measure: Measure, costs: Costs, tolerance: float, nothing: Effect) -> None:
        """nothing: what remains with every op in FP32."""
        self._measure, self._costs, self._tolerance = measure, costs, tolerance
        self.measured: dict[Chosen, Effect] = {Chosen(): nothing}
        self._first: dict[Chosen, float] = {}
        self.alone: dict[Unit, Effect] = {}
        self.order: list[Unit] = []
        self.left: list[Unit] = []

    def run(self, names: Sequence[Unit]) -> Chosen:
        """The choice among names."""
        wished = self._worth_it(names)
        self.order = [unit for unit in names if unit <= wished]
        if wished and not self.effect(wished).size <= self._tolerance:
            wished = self._filled(self._divided(self._ranked(self.order, wished)), wished)
        return self._with_harmless(wished, names)

    def harm(self, unit: Unit) -> float:
        """The square of the error of a unit alone; a unit that was not run alone has that of its parts."""
        if unit in self.alone:
            return self.alone[unit].size ** 2
        return sum(effect.size**2 for part, effect in self.alone.items() if part < unit)

    def effect(self, chosen: Chosen) -> Effect:
        """What a choice does to all batches."""
        if chosen not in self.measured:
            self.measured[chosen] = self._measure(chosen)
        return self.measured[chosen]

    def holds(self, chosen: Chosen) -> bool:
        """Whether the error of a choice is within the tolerance."""
        if chosen not in self.measured:
            self.measured[chosen] = self._measure(chosen, enough=self._tolerance)
        return self.measured[chosen].size <= self._tolerance

    def dropped(self, chosen: Chosen, holds: Callable[[Chosen], float]) -> Chosen:
        """As much of the choice, in the order of the ranking, as holds on other batches too; `holds` gives the size."""
        size = holds(chosen)
        if size <= self._tolerance or not chosen:
            return chosen
        order = self._ranked(self._divided(self._ranked(self.order, chosen)), chosen)
        sums = [*itertools.accumulate(map(self.harm, order))]
        room = sums[-1] * (self._tolerance / size) ** 2 if math.isfinite(size) else 0.0
        guess = sum(each <= room for each in sums)
        count = _longest(len(order), lambda n: holds(Chosen().union(*order[:n])) <= self._tolerance, guess)
        self.order, self.left = order[:count], self.left + order[count:]
        return Chosen().union(*self.order)

    def _worth_it(self, names: Sequence[Unit]) -> Chosen:
        """The choice that costs least, without what together saves next to nothing."""
        wished = self._costs.cheapest(names)
        room = SLACK * (self._costs.of(Chosen()) - self._costs.of(wished))
        units = [unit for unit in names if unit <= wished]
        for gain, unit in sorted([(self._costs.gain(unit, wished), sorted(unit)) for unit in units]):
            if gain > room:
                break
            room -= gain
            wished = wished.difference(unit)
        return wished

    def _run_alone(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit not in self.alone:
                self.alone[unit] = self._measure(unit, first=1)

    def _ranked(self, units: Sequence[Unit], wished: Chosen) -> list[Unit]:
        """Those that do least for what they save first; of two that do alike, the one with the smaller error."""
        self._run_alone(units)
        key = {unit: self.harm(unit) / max(self._costs.gain(unit, wished), 1e-30) for unit in units}
        return sorted(units, key=lambda unit: (key[unit], self.harm(unit), sorted(unit)))

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

    def _filled(self, units: Sequence[Unit], wished: Chosen) -> Chosen:
        """As much of the units as holds. What does not fit is left out, and the search goes on behind it."""
        chosen, order = Chosen(), self._ranked(units, wished)
        self.order = []
        while order:
            sums = itertools.accumulate(self.harm(unit) for unit in order)
            guess = sum(each <= self._room(chosen) for each in sums)  # with errors that are independent

            def fits(count: int, before: Chosen = chosen, order: list[Unit] = order) -> bool:
                return self.holds(before.union(*order[:count]))

            count = len(order) if fits(len(order)) else _longest(len(order), fits, guess)
            chosen = chosen.union(*order[:count])
            self.order += order[:count]
            self.left += order[count : count + 1]
            room, rest = self._room(chosen), order[count + 1 :]
            order = [unit for unit in rest if self.harm(unit) <= _FAR * room]
            self.left += [unit for unit in rest if unit not in order]
        return self._retried(chosen)

    def _room(self, chosen: Chosen) -> float:
        """What is left of the squared tolerance."""
        return self._tolerance**2 - self.effect(chosen).size ** 2

    def _retried(self, chosen: Chosen) -> Chosen:
        """With units that were left out: in the place of others that save less, and by twos."""
        finite = [unit for unit in self.left if math.isfinite(self.harm(unit))]
        by_gain = sorted(finite, key=lambda unit: -self._costs.gain(unit, chosen))[:_RETRIED]
        for added in [*((unit,) for unit in by_gain), *itertools.combinations(by_gain, 2)]:
            removed = self._in_the_place_of(added[0], chosen) if len(added) == 1 else []
            if removed is None or any(unit <= chosen for unit in added):
                continue
            other = (chosen - Chosen().union(*removed)).union(*added)
            if self._costs.of(other) < self._costs.of(chosen) and self._may_hold(other, chosen) and self.holds(other):
                self.left = [unit for unit in [*self.left, *removed] if unit not in added]
                self.order = [unit for unit in self.order if unit not in removed] + [*added]
                chosen = other
        return chosen

    def _may_hold(self, other: Chosen, chosen: Chosen) -> bool:
        """Whether one batch promises it: where the error grows from the choice's to the other's as it does in all."""
        first, whole = self._of_first(chosen), self.effect(chosen).size
        return first == 0 or self._of_first(other) * whole / first <= self._tolerance

    def _of_first(self, chosen: Chosen) -> float:
        """The error of the first batch."""
        if chosen in self.measured and self.measured[chosen].by_batch:
            return self.measured[chosen].by_batch[0]
        if chosen not in self._first:
            self._first[chosen] = self._measure(chosen, first=1).size
        return self._first[chosen]

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

    def _with_harmless(self, chosen: Chosen, names: Sequence[Unit]) -> Chosen:
        """With what saves next to nothing, as far as next to no error is added: all of it, or what does least alone."""
        tried = Chosen().union(chosen, *self.left)
        small = [unit for unit in names if not unit & tried and self._costs.gain(unit, chosen) >= 0]
        if not chosen or not small or self._is_as_good(chosen.union(*small), chosen):
            self.order += small
            return chosen.union(*small) if chosen else chosen
        self._run_alone(small)
        small.sort(key=lambda unit: (self.harm(unit), sorted(unit)))
        room = ((1 + SLACK) ** 2 - 1) * self._of_first(chosen) ** 2
        sums = itertools.accumulate(map(self.harm, small))
        harmless = [unit for unit, harm in zip(small, sums, strict=True) if harm <= room]
        if not harmless or not self._is_as_good(chosen.union(*harmless), chosen):
            return chosen
        self.order += harmless
        return chosen.union(*harmless)

    def _is_as_good(self, larger: Chosen, chosen: Chosen) -> bool:
        """Whether a choice adds next to no error to another one: of the first batch, then of all."""
        if self._of_first(larger) > (1 + SLACK) * self._of_first(chosen):
            return False
        return self.effect(larger).size <= min(self._tolerance, (1 + SLACK) * self.effect(chosen).size)


def _longest(many: int, fits: Callable[[int], bool], guess: int) -> int:
    """The largest count that fits, between none and one that does not: in growing steps from a guess."""
    few, step = 0, 1
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
    blocks: dict[tuple[str, ...], list[NameInModule]] = {}
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
