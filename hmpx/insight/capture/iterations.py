"""Which iterations of a training are looked at."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

_SHARE = 0.05  # of the time: what looking at ops may take, after the first iteration that is looked at
_FREE = 0.3  # seconds


class Iterations:
    """Counts iterations, and says before each whether its ops are to be looked at.

    That is the third of a stage of the training, and then the 11th, 24th, 37th and so on, as long as looking takes no
    more than `_SHARE` of the time, or `_FREE` in all: what the program does in every tenth of them is met as well.

    Attributes:
        count: how many are over. watched: the iterations whose ops were looked at. is_due: whether the next one is too.
    """

    def __init__(self, at: Collection[int]) -> None:
        self._at = frozenset(at)  # in any case
        self.count = self._stage = 0
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
        next_one = self.count + 1 - self._stage
        is_affordable = self._took <= max(_FREE, _SHARE * (now - self._began))
        self.is_due = self.count + 1 in self._at or next_one == 3 or (next_one % 13 == 11 and is_affordable)

    def restart(self) -> None:
        """Count from 1: what was counted before were backward passes, and not steps."""
        self.count = 0
        self.watched.clear()

    def begin_stage(self) -> None:
        """Another optimizer trains from the iteration that has just begun on."""
        self._stage = self.count
