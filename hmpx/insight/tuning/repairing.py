"""Verify and repair: move what does harm to FP32 until the tolerance holds, then back what need not be there."""

from __future__ import annotations

import math
from collections.abc import Callable

from hmpx.insight.tuning.choosing import SLACK
from hmpx.insight.tuning.problem import Chosen, Effect, Part, Problem

_OTHERS = 3  # verifications that are not of a repair: of the lists that are written, and of two that are known
_HOPELESS = 3.0  # a prediction so many times the tolerance need not be tried
Verify = Callable[[Chosen], Effect]


class Repair:
    """Finds the choice that holds on held-out batches.

    tried: each choice that was verified, and what it does.
    """

    def __init__(self, problem: Problem, verify: Verify, tolerance: float) -> None:
        self._problem, self._verify, self._tolerance = problem, verify, tolerance
        self.tried: dict[Chosen, Effect] = {}
        self._least = SLACK * (problem.cost(()) - problem.cost(problem.cheapest(0.0)))
        self.budget = 2 * math.ceil(math.log2(max(len(problem.parts), 1))) + 10 - _OTHERS

    def _effect(self, chosen: Chosen) -> Effect:
        if chosen not in self.tried:
            self.tried[chosen] = self._verify(chosen)
        return self.tried[chosen]

    def _holds(self, chosen: Chosen) -> bool:
        return self._effect(chosen).meets(self._tolerance)

    @property
    def _left(self) -> int:
        return self.budget - len(self.tried)

    def run(self, chosen: Chosen, wished: Chosen) -> Chosen:
        """The best choice found, from a first one.

        wished: what would be in BF16 if errors were free.
        """
        if not self._holds(chosen):
            chosen = self._less(chosen)
        return self._more(chosen, wished - chosen - self._problem.pinned.keys())

    def _less(self, chosen: Chosen) -> Chosen:
        """Without the worst part, the two, four ... worst; then of these as few as will do."""
        worst = self._worst_first(chosen)
        moved = 1
        while not self._holds(chosen - set(worst[:moved])) and moved < len(worst) and self._left > 1:
            moved = min(2 * moved, len(worst))
        if not self._holds(chosen - set(worst[:moved])):
            return frozenset()
        few = moved // 2  # with which it did not hold
        while moved - few > 1 and self._left:
            middle = (few + moved) // 2
            few, moved = (few, middle) if self._holds(chosen - set(worst[:middle])) else (middle, moved)
        return chosen - set(worst[:moved])

    def _more(self, chosen: Chosen, candidates: Chosen) -> Chosen:
        """With as many of the candidates as will do: in halves, those that are thought to do least first."""
        groups = [[*reversed(self._worst_first(frozenset(candidates)))]]
        while groups and self._left:
            group = [part for part in groups.pop(0) if part not in chosen]
            if not group:
                continue
            more = chosen | set(group)
            if self._is_promising(chosen, more) and self._holds(more):
                chosen = more
                continue
            if len(group) > 1:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        return chosen

    def _is_promising(self, chosen: Chosen, more: Chosen) -> bool:
        """Whether a choice is worth a run: it saves something, and is not predicted to be far too wrong."""
        saved = self._problem.cost(chosen) - self._problem.cost(more)
        return saved > self._least and self._problem.predicted(more).meets(_HOPELESS * self._tolerance)

    def _worst_first(self, parts: Chosen) -> list[Part]:
        """What nothing is known of first, then by what is known."""
        return sorted(
            parts, key=lambda part: (part not in self._problem.unseen, -self._problem.harm(part, parts), str(part))
        )
