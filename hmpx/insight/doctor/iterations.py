"""Which iterations of a training have their ops looked at, so that this takes no more than a share of the time."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

_SHARE = 0.1  # of the time: what looking at ops may take, after the first iteration that is looked at


class Iterations:
    """Counts iterations, and says before each whether its ops are to be looked at.

    Attributes:
        count: how many are over. watched: those whose ops were looked at. is_due: whether the next one's are to be.
    """

    def __init__(self, at: Collection[int]) -> None:
        self._at = frozenset(at)  # in any case
        self.count = 0
        self.watched: list[int] = []
        self.is_due = False
        self._began = self._last = perf_counter()
        self._took = 0.0  # looking at ops
        self._plain = 0.0  # the shortest iteration in which nobody looked

    @property
    def first_is_due(self) -> bool:
        return 1 in self._at

    def over(self, was_looked_at: bool) -> None:
        """Count an iteration, and decide about the next one."""
        self.count += 1
        now = perf_counter()
        took, self._last = now - self._last, now
        if was_looked_at:
            self.watched.append(self.count)
            self._took += took - self._plain if self.count > 1 else 0.0
        elif self.count > 1:
            self._plain = min(self._plain or took, took)
        next_one = self.count + 1
        is_affordable = self._took <= _SHARE * (now - self._began)
        self.is_due = next_one in self._at or next_one == 3 or (next_one % 10 == 0 and is_affordable)
