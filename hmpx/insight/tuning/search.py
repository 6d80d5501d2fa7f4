"""The search: as much in low precision as holds.

1. Everything that saves something is measured together. If it holds, only step 5 is left.
2. Else each unit (a list name, everywhere) runs alone in low precision in one batch. Its harm is the square of the
   error. Units are ranked by harm over what they save; one that takes a large part of the tolerance is divided by
   module, outer blocks first.
3. The longest beginning of the ranking that holds is found by bisection. The unit behind it is left out, and the search
   goes on behind that.
4. A unit that was left out is tried in the place of units that save less.
5. Units that save next to nothing are added if the error does not grow: this saves casts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from hmpx.insight.trials.runs import Effect
from hmpx.insight.trials.search import largest, longest, parts_of
from hmpx.insight.tuning.worth import SLACK, Chosen, Unit, Worths

_LARGE = 0.25  # of the tolerance, as a square: a unit that takes more is divided by module
_SWAPS = 3  # units that were left out and are tried again
_FAR = 2.0  # times the room that is left, as a square: a unit that takes more is not tried


class Search:
    """One search.

    measure: called as measure(choice, batches, enough=math.inf), returns what the choice changes in these batches; it
    may end early where the error exceeds `enough`. nothing: what remains with every op in FP32. batches: their numbers;
    the one that shows most comes to stand first. measured: what choices do to all batches; one that does not hold may
    have been measured in fewer. alone: what units do alone in the first batch. order: the units of the choice, the one
    that does least for what it saves first. left: the units that do not fit.
    """

    def __init__(
        self, measure: Callable[..., Effect], batches: list[int], worths: Worths, tolerance: float, nothing: Effect
    ) -> None:
        self._measure, self._batches, self._worths, self._tolerance = measure, batches, worths, tolerance
        self.measured: dict[Chosen, Effect] = {Chosen(): nothing}
        self.alone: dict[Unit, Effect] = {}
        self.order: list[Unit] = []
        self.left: list[Unit] = []

    def run(self, names: Sequence[Unit]) -> Chosen:
        """Return the choice among names."""
        chosen = self._worths.wished(names)
        self.order = [unit for unit in names if unit <= chosen]
        if chosen:
            by_batch = self.effect(chosen).by_batch
            self._batches.sort(key=lambda number: -by_batch.get(number, 0.0))
            if not self.holds(chosen):
                chosen = self._swapped(self._filled(self._ranked(self.order)))
        return self._with_harmless(chosen, names)

    def effect(self, chosen: Chosen, enough: float = math.inf) -> Effect:
        """Return what a choice does to all batches."""
        if chosen not in self.measured:
            self.measured[chosen] = self._measure(chosen, self._batches, enough)
        return self.measured[chosen]

    def holds(self, chosen: Chosen) -> bool:
        """Return whether the error of a choice is within the tolerance."""
        return self.effect(chosen, self._tolerance).size <= self._tolerance

    def dropped(self, chosen: Chosen, size_of: Callable[[Chosen], float]) -> Chosen:
        """Return as much of the choice, in the order of the ranking, as holds on its own and on other batches.

        size_of: what a choice does to the other batches.
        """
        size = size_of(chosen)
        if size <= self._tolerance or not chosen:
            return chosen
        order = self._ranked(self.order)
        room = sum(map(self._harm, order)) * (self._tolerance / size) ** 2 if math.isfinite(size) else 0.0

        def holds(some: list[Unit]) -> bool:
            part = Chosen().union(*some)
            return size_of(part) <= self._tolerance and self.holds(part)

        count = longest(len(order), lambda n: holds(order[:n]), self._fitting(order, room))
        self.order, self.left = order[:count], self.left + order[count:]
        return Chosen().union(*self.order)

    def _harm(self, unit: Unit) -> float:
        """Return the square of the error of a unit alone in the first batch."""
        if unit not in self.alone:
            self.alone[unit] = self._measure(unit, self._batches[:1])
        return self.alone[unit].size ** 2

    def _ranked(self, units: Sequence[Unit]) -> list[Unit]:
        """Return the units, harmful ones divided, ranked by harm for what they save; of equal ones the least harm."""
        found, rest = [], [*units]
        while rest:
            unit = rest.pop()
            if len(unit) == 1 or self._harm(unit) <= _LARGE * self._tolerance**2:
                found.append(unit)
            else:
                rest += parts_of(unit, lambda place: place.module)
        key = {unit: self._harm(unit) / max(self._worths.gain(unit), 1e-30) for unit in found}
        return sorted(found, key=lambda unit: (key[unit], self._harm(unit), sorted(unit)))

    def _filled(self, order: list[Unit]) -> Chosen:
        """Return as much of a ranking as holds. What does not fit is left out, and the search goes on behind it."""

        def union(units: list[Unit]) -> Chosen:
            return Chosen().union(*units)

        self.order, self.left = largest(
            order,
            lambda units: self.holds(union(units)),
            lambda kept, rest: self._fitting(rest, self._room(union(kept))),
            lambda unit, kept: self._harm(unit) > _FAR * self._room(union(kept)),
        )
        return union(self.order)

    def _fitting(self, order: Sequence[Unit], room: float) -> int:
        """Return how many of the first have room, if errors are independent."""
        return sum(harm <= room for harm in itertools.accumulate(map(self._harm, order)))

    def _room(self, chosen: Chosen) -> float:
        """Return what is left of the squared tolerance."""
        return self._tolerance**2 - self.effect(chosen).size ** 2

    def _swapped(self, chosen: Chosen) -> Chosen:
        """Return the choice with units that were left out in the place of others that together save less."""
        finite = [unit for unit in self.left if math.isfinite(self._harm(unit))]
        for added in sorted(finite, key=lambda unit: -self._worths.gain(unit))[:_SWAPS]:
            gain, room = self._worths.gain(added), self._room(chosen) - self._harm(added)
            removed: list[Unit] = []
            for unit in sorted(self.order, key=self._harm, reverse=True):
                if room < 0 and self._worths.gain(unit) < gain:
                    removed.append(unit)
                    gain -= self._worths.gain(unit)
                    room += self._harm(unit)
            other = chosen.difference(*removed) | added
            if removed and room >= 0 and gain > 0 and self.holds(other):
                self.left = [unit for unit in [*self.left, *removed] if unit != added]
                self.order = [unit for unit in self.order if unit not in removed] + [added]
                chosen = other
        return chosen

    def _with_harmless(self, chosen: Chosen, names: Sequence[Unit]) -> Chosen:
        """Return the choice with what saves next to nothing: all of it, or what does least alone, or none of it."""
        tried = Chosen().union(chosen, *self.left)
        small = [unit for unit in names if not unit & tried]
        if not chosen or not small:
            return chosen
        if not self._is_as_good(chosen.union(*small), chosen):
            small.sort(key=lambda unit: (self._harm(unit), sorted(unit)))
            room = ((1 + SLACK) ** 2 - 1) * self.effect(chosen).by_batch[self._batches[0]] ** 2
            sums = itertools.accumulate(map(self._harm, small))
            small = small[: sum(harm <= room for harm in sums)]
            if not self._is_as_good(chosen.union(*small), chosen):
                return chosen
        self.order += small
        return chosen.union(*small)

    def _is_as_good(self, larger: Chosen, chosen: Chosen) -> bool:
        """Return whether a choice adds next to no error to another one: in the first batch, then in all."""
        first, before = self._batches[:1], self.effect(chosen)
        if larger not in self.measured and self._measure(larger, first).size > (1 + SLACK) * before.by_batch[first[0]]:
            return False
        return self.effect(larger).size <= min(self._tolerance, (1 + SLACK) * before.size)
