"""What `GradScaler` does: how many steps it has skipped."""

from __future__ import annotations

from typing import Any


class Scaling:
    """The calls of ``scaler.step`` of every enabled scaler."""

    def __init__(self) -> None:
        self._skipped: list[bool] = []
        self.scale = 0.0

    def stepped(self, scaler: Any, skipped: bool) -> None:
        """One call has returned."""
        if scaler.is_enabled():
            self._skipped.append(skipped)
            self.scale = scaler.get_scale()

    @property
    def attempts(self) -> int:
        """How many calls there were."""
        return len(self._skipped)

    @property
    def late(self) -> tuple[int, int]:
        """Of the later half of the calls, by when the scale has settled: how many skipped their step, of how many."""
        half = self._skipped[len(self._skipped) // 2 :]
        return sum(half), len(half)
