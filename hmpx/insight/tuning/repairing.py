"""Verify and repair: move what does harm to FP32 until the tolerance holds, then back what need not be there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from hmpx.insight.tuning.choosing import SLACK
from hmpx.insight.tuning.problem import Chosen, Effect, Part, Problem

_HOPELESS = 3.0  # a prediction so many times the tolerance need not be tried
_OTHERS = 6  # verifications beside those of a repair: of the lists that are written, of known ones, of FP32


class Budget:
    """How many verifications are left, of 2 log2 N + 10 for N names."""

    def __init__(self, names: int) -> None:
        self.left = 2 * math.ceil(math.log2(max(names, 1))) + 10 - _OTHERS


class Repair:
    """Makes a choice one that holds on held-out batches, as far as the budget goes.

    verify: what a choice does there, from memory where it was measured already.
    """

    def __init__(self, problem: Problem, verify: Callable[[Chosen], Effect], tolerance: float, budget: Budget) -> None:
        self._problem, self._verify, self._tolerance, self._budget = problem, verify, tolerance, budget
        self._known: dict[Chosen, bool] = {}
        self._least = SLACK * (problem.cost(()) - problem.cost(problem.cheapest(0.0)))

    def holds(self, chosen: Chosen) -> bool:
        """Whether a choice is within the tolerance."""
        if chosen not in self._known:
            self._budget.left -= 1
            self._known[chosen] = self._verify(chosen).meets(self._tolerance)
        return self._known[chosen]

    def less(self, chosen: Chosen) -> Chosen:
        """Without the worst part, the two, four ... worst; then of these as few as will do."""
        if self.holds(chosen):
            return chosen
        worst = self._worst_first(chosen)
        moved = min(1, len(worst))
        while not self.holds(chosen - set(worst[:moved])):
            if moved == len(worst) or self._budget.left <= 1:
                return frozenset()
            moved = min(2 * moved, len(worst))
        few = moved // 2  # with which it did not hold
        while moved - few > 1 and self._budget.left > 0:
            middle = (few + moved) // 2
            few, moved = (few, middle) if self.holds(chosen - set(worst[:middle])) else (middle, moved)
        return chosen - set(worst[:moved])

    def more(self, chosen: Chosen, wished: Chosen) -> Chosen:
        """With as much of what is wished for as will do: in halves, what is thought to do least first."""
        candidates = frozenset(wished - chosen - self._problem.pinned.keys())
        groups = [[*reversed(self._worst_first(candidates))]]
        while groups and self._budget.left > 0:
            group = groups.pop(0)
            larger = chosen | set(group)
            if self._is_promising(chosen, larger) and self.holds(larger):
                chosen = larger
            elif len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return chosen

    def best(self, chosen: Chosen, others: Iterable[Chosen]) -> Chosen:
        """The choice, or another one that costs no more and does less."""
        for other in others:
            if self._problem.cost(other) <= self._problem.cost(chosen) + self._least and self.holds(other):
                chosen = min(chosen, other, key=lambda each: self._verify(each).size)
        return chosen

    def _is_promising(self, chosen: Chosen, larger: Chosen) -> bool:
        """Whether a choice is worth a run: it saves something, and is not predicted to be far too wrong."""
        saved = self._problem.cost(chosen) - self._problem.cost(larger)
        return saved > self._least and self._problem.predicted(larger).meets(_HOPELESS * self._tolerance)

    def _worst_first(self, parts: Chosen) -> list[Part]:
        """What nothing is known of first, then by what is known."""
        return sorted(
            parts, key=lambda part: (part not in self._problem.unseen, -self._problem.harm(part, parts), str(part))
        )
