"""How far it is, and how long it will take yet."""

from __future__ import annotations

import sys
from time import perf_counter

_WIDTH = 24


class Progress:
    """A line on standard error, written over and over.

    total: steps that are expected, of a forward and a backward pass. name: of the function that is running.
    """

    def __init__(self, total: int, shown: bool, name: str = "tune") -> None:
        self._total, self._shown, self._done, self._name = total, shown, 0, name
        self._began = perf_counter()

    def step(self, words: str) -> None:
        """One more is done."""
        self._done += 1
        self._total = max(self._total, self._done)
        if self._shown:
            share = self._done / self._total
            left = (perf_counter() - self._began) / self._done * (self._total - self._done)
            bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
            line = f"\r{self._name}: {bar} {words}, step {self._done} of about {self._total}, {left:.0f} s left"
            print(f"{line:100}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the line."""
        if self._shown and self._done:
            print(file=sys.stderr)
