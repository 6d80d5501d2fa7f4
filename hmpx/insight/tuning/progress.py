"""How far it is: a bar on a terminal, one line elsewhere."""

from __future__ import annotations

import sys
from time import perf_counter

_WIDTH = 24


class Progress:
    """A bar on standard error, drawn over and over; where that is no terminal, one line at the end.

    total: steps that are expected, of a forward and a backward pass. name: of the function that is running.
    """

    def __init__(self, total: int, shown: bool, name: str = "tune") -> None:
        self._total, self._shown, self._done, self._name = total, shown, 0, name
        self._began = perf_counter()
        self._drawn = shown and sys.stderr.isatty()

    def expect(self, more: int) -> None:
        """So many steps are still to come."""
        self._total = self._done + more

    def step(self, words: str) -> None:
        """One more is done."""
        self._done += 1
        self._total = max(self._total, self._done)
        if self._drawn:
            share = self._done / self._total
            left = (perf_counter() - self._began) / self._done * (self._total - self._done)
            bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
            line = f"\r{self._name}: {bar} {words}, step {self._done} of about {self._total}, {left:.0f} s left"
            print(f"{line:100}", end="", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line of its own, which stays."""
        if self._shown:
            print(f"\r{line:100}".rstrip() if self._drawn else line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the bar, or write the one line."""
        if self._drawn and self._done:
            print(file=sys.stderr)
        elif self._shown and self._done:
            seconds = perf_counter() - self._began
            print(f"{self._name}: {self._done} steps in {seconds:.0f} s", file=sys.stderr, flush=True)
