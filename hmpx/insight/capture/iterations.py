"""Which iterations of a training are looked at."""

from __future__ import annotations

from collections.abc import Collection
from time import perf_counter

_SHARE = 0.05  # of the time: what looking at ops may take, after the first iteration that is looked at
_FREE = 1.0  # seconds
_LOOKS = (3, 11, 22, 40, 41, 50)  # of tens and of twenties the last, the first and the second


class Iterations:
    """Counts iterations, and says before each whether its ops are to be looked at.

    That are those of `_LOOKS` in a stage of the training, and then every 13th, after the first as long as looking takes
    no more than `_SHARE` of the time, or `_FREE` in all. What a program does ``if step % 10 == 0`` is met as well,
    wherever it counts from, before its step and after it.

    Attributes:
        count: how many are over. watched: the iterations whose ops were looked at. is_due: whether the next one is too.
        passed_over: how many were left out, since looking would have taken too long.
    """

    def __init__(self, at: Collection[int], only: bool = False) -> None:
        self._at, self._only = at, only  # in any case, or only these
        self.count = self._stage = self.passed_over = 0
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
        is_turn = next_one in _LOOKS or (next_one > _LOOKS[-1] and next_one % 13 == 11)
        is_affordable = self._took <= max(_FREE, _SHARE * (now - self._began))
        is_next = not self._only and (next_one == _LOOKS[0] or (is_turn and is_affordable))
        self.is_due = self.count + 1 in self._at or is_next
        self.passed_over += is_turn and not self.is_due

    def restart(self) -> None:
        """Count from 1: what was counted before were backward passes, and not steps."""
        self.count = self.passed_over = 0
        self.watched.clear()

    def begin_stage(self) -> None:
        """Another optimizer trains from the iteration that has just begun on."""
        self._stage = self.count
