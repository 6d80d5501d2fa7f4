"""The search of `compare` and `tune`: as much in low precision as holds.

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
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from hmpx.insight.report import grouped
from hmpx.insight.trials.runs import Effect

T = TypeVar("T")
PIECES = 8  # into which something is divided at once
SLACK = 0.02  # of what low precision saves in all: less than that is no reason for an error
_LARGE = 0.25  # of the tolerance, as a square: a unit that takes more is divided by module
_SWAPS = 3  # units that were left out and are tried again
_FAR = 2.0  # times the room that is left, as a square: a unit that takes more is not tried


def largest(
    order: Sequence[T],
    holds: Callable[[list[T]], bool],
    guess: Callable[[list[T], list[T]], int] = lambda kept, rest: len(rest) // 2,
    hopeless: Callable[[T, list[T]], bool] = lambda unit, kept: False,
) -> tuple[list[T], list[T]]:
    """Return what holds together, and what is left out. The first of the order are wanted most.

    Args:
        holds: whether a part holds; it is never asked about nothing.
        guess: called as guess(kept, rest), how many of the first of the rest probably hold beside what is kept.
        hopeless: called as hopeless(unit, kept), whether a unit need not be tried beside what is kept.
    """
    kept: list[T] = []
    left: list[T] = []
    rest = [*order]
    while rest:
        count = longest(len(rest), lambda n: holds(kept + rest[:n]), guess(kept, rest))  # noqa: B023  called here
        kept += rest[:count]
        left += rest[count : count + 1]
        behind = rest[count + 1 :]
        rest = [unit for unit in behind if not hopeless(unit, kept)]
        left += [unit for unit in behind if unit not in rest]
    return kept, left


def longest(many: int, holds: Callable[[int], bool], guess: int) -> int:
    """Return how many of the first hold: all of them, or by bisection in growing steps from a guess."""
    few, step = 0, 1
    if holds(many):
        return many
    while many - few > 1:
        middle = min(max(guess, few + 1), many - 1)
        if holds(middle):
            few, guess = middle, middle + step
        else:
            many, guess = middle, middle - step
        step *= 2
    return few


def pieces_of(unit: Collection[T], module_of: Callable[[T], str]) -> list[frozenset[T]]:
    """Divide by the outermost blocks in which modules differ; many blocks stay together by neighbours.

    What has one module has one part.
    """
    ordered = sorted(unit, key=lambda each: _block_key(module_of(each)))
    blocks: dict[tuple, list[T]] = {}
    for depth in range(1, 2 + max(module_of(each).count(".") for each in ordered)):
        blocks = grouped(ordered, lambda each: tuple(module_of(each).split(".")[:depth]))  # noqa: B023  called here
        if len(blocks) > 1:
            break
    groups = [*blocks.values()]
    size = math.ceil(len(groups) / PIECES)
    return [frozenset(itertools.chain(*groups[i : i + size])) for i in range(0, len(groups), size)]


def _block_key(module: str) -> tuple:
    """Return a key by which block 10 stands behind block 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in module.split("."))


class Search:
    """One search.

    measure: called as measure(choice, batches, enough=math.inf), returns what the choice changes in these batches; it
    may end early where the error exceeds `enough`. batches: their numbers; the one that shows most comes to stand
    first. nothing: what remains with every op in FP32. gain: what places save.

    measured: what choices do to all batches; a choice that does not hold may have been measured in fewer. alone: what
    units do alone in the first batch. order: the units of the choice, the one that does least for what it saves first.
    left: the units that do not fit.
    """

    def __init__(
        self,
        measure: Callable[..., Effect],
        batches: list[int],
        tolerance: float,
        nothing: Effect,
        gain: Callable[[Collection], float] = len,
    ) -> None:
        self._measure, self._batches, self._gain, self._tolerance = measure, batches, gain, tolerance
        self.measured: dict[frozenset, Effect] = {frozenset(): nothing}
        self.alone: dict[frozenset, Effect] = {}
        self.order: list[frozenset] = []
        self.left: list[frozenset] = []

    def run(self, names: Sequence[frozenset], wished: frozenset | None = None) -> frozenset:
        """Return the choice among names. wished: the part of them that is worth an error; None: all of them."""
        chosen = frozenset().union(*names) if wished is None else wished
        self.order = [unit for unit in names if unit <= chosen]
        if chosen:
            by_batch = self.effect(chosen).by_batch
            self._batches.sort(key=lambda number: -by_batch.get(number, 0.0))
            if not self.holds(chosen):
                # Beginnings of the ranking are tried, not one op more or less: some NaN are cured by two ops together.
                chosen = self._swapped(self._filled(self._ranked(self.order)))
        return self._with_harmless(chosen, names)

    def effect(self, chosen: frozenset, enough: float = math.inf) -> Effect:
        if chosen not in self.measured:
            self.measured[chosen] = self._measure(chosen, self._batches, enough)
        return self.measured[chosen]

    def holds(self, chosen: frozenset) -> bool:  # in all batches: by the worst alone, too many units are to blame
        return self.effect(chosen, self._tolerance).size <= self._tolerance

    def dropped(self, chosen: frozenset, size_of: Callable[[frozenset], float]) -> frozenset:
        """Return as much of the choice, in the order of the ranking, as holds on its own and on other batches.

        size_of: what a choice does to the other batches.
        """
        size = size_of(chosen)
        if size <= self._tolerance or not chosen:
            return chosen
        order = self._ranked(self.order)
        room = sum(map(self._harm, order)) * (self._tolerance / size) ** 2 if math.isfinite(size) else 0.0

        def holds(some: list[frozenset]) -> bool:
            part = frozenset().union(*some)
            return size_of(part) <= self._tolerance and self.holds(part)

        count = longest(len(order), lambda n: holds(order[:n]), self._fitting(order, room))
        self.order, self.left = order[:count], self.left + order[count:]
        return frozenset().union(*self.order)

    def _harm(self, unit: frozenset) -> float:
        """Return the square of the error of a unit alone in the first batch.

        That is an error of gradients. How far the unit's own result is off ranks ops badly.
        """
        if unit not in self.alone:
            self.alone[unit] = self._measure(unit, self._batches[:1])
        return self.alone[unit].size ** 2

    def _ranked(self, units: Sequence[frozenset]) -> list[frozenset]:
        """Return the units, harmful ones divided, ranked by harm for what they save; of equal ones the least harm."""
        found, rest = [], [*units]
        while rest:
            unit = rest.pop()
            pieces = pieces_of(unit, lambda place: place.module)
            if len(pieces) == 1 or self._harm(unit) <= _LARGE * self._tolerance**2:
                found.append(unit)
            else:
                rest += pieces
        key = {unit: self._harm(unit) / max(self._gain(unit), 1e-30) for unit in found}
        return sorted(found, key=lambda unit: (key[unit], self._harm(unit), sorted(map(str, unit))))

    def _filled(self, order: list[frozenset]) -> frozenset:
        """Return as much of a ranking as holds. What does not fit is left out, and the search goes on behind it."""

        def union(units: list[frozenset]) -> frozenset:
            return frozenset().union(*units)

        self.order, self.left = largest(
            order,
            lambda units: self.holds(union(units)),
            lambda kept, rest: self._fitting(rest, self._room(union(kept))),
            lambda unit, kept: self._harm(unit) > _FAR * self._room(union(kept)),
        )
        return union(self.order)

    def _fitting(self, order: Sequence[frozenset], room: float) -> int:
        """Return how many of the first have room, if errors are independent."""
        return sum(harm <= room for harm in itertools.accumulate(map(self._harm, order)))

    def _room(self, chosen: frozenset) -> float:
        return self._tolerance**2 - self.effect(chosen).size ** 2

    def _swapped(self, chosen: frozenset) -> frozenset:
        """Return the choice with units that were left out in the place of others that together save less."""
        finite = [unit for unit in self.left if math.isfinite(self._harm(unit))]
        for added in sorted(finite, key=lambda unit: -self._gain(unit))[:_SWAPS]:
            gain, room = self._gain(added), self._room(chosen) - self._harm(added)
            removed: list[frozenset] = []
            for unit in sorted(self.order, key=self._harm, reverse=True):
                if room < 0 and self._gain(unit) < gain:
                    removed.append(unit)
                    gain -= self._gain(unit)
                    room += self._harm(unit)
            other = chosen.difference(*removed) | added
            if removed and room >= 0 and gain > 0 and self.holds(other):
                self.left = [unit for unit in [*self.left, *removed] if unit != added]
                self.order = [unit for unit in self.order if unit not in removed] + [added]
                chosen = other
        return chosen

    def _with_harmless(self, chosen: frozenset, names: Sequence[frozenset]) -> frozenset:
        """Return the choice with what saves next to nothing: all of it, or what does least alone, or none of it."""
        tried = frozenset().union(chosen, *self.left)
        small = [unit for unit in names if not unit & tried]
        if not chosen or not small:
            return chosen
        if not self._is_as_good(chosen.union(*small), chosen):
            small.sort(key=lambda unit: (self._harm(unit), sorted(map(str, unit))))
            room = ((1 + SLACK) ** 2 - 1) * self.effect(chosen).by_batch[self._batches[0]] ** 2
            sums = itertools.accumulate(map(self._harm, small))
            small = small[: sum(harm <= room for harm in sums)]
            if not self._is_as_good(chosen.union(*small), chosen):
                return chosen
        self.order += small
        return chosen.union(*small)

    def _is_as_good(self, larger: frozenset, chosen: frozenset) -> bool:
        """Return whether a choice adds next to no error to another one: in the first batch, then in all."""
        first, before = self._batches[:1], self.effect(chosen)
        if larger not in self.measured and self._measure(larger, first).size > (1 + SLACK) * before.by_batch[first[0]]:
            return False
        return self.effect(larger).size <= min(self._tolerance, (1 + SLACK) * before.size)
