"""What a comparison holds: rows, and which of them are to blame."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hmpx.insight.comparing.row import BROKEN, Row

_MAGNIFIED = 10  # an error of an op alone so many times another's is its own doing


@dataclass(frozen=True)
class Found:
    """The values of a `Comparison`, which says what they are."""

    rows: tuple[Row, ...]
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
    loss: float = math.nan
    loss_change: float = math.nan
    first_nonfinite: Row | None = None
    passes: int = 0
    policy: str = ""
    _ops: tuple[Row, ...] = field(default=(), repr=False)
    _modules: tuple[Row, ...] = field(default=(), repr=False)

    def by_op(self) -> list[Row]:
        """A row for each op, the worst first: errors of its sites together, effects added up with their signs."""
        return sorted(self._ops, key=_order)

    def by_module(self) -> list[Row]:
        """A row for each module, the worst first. What its submodules call counts for them alone."""
        return sorted(self._modules, key=_order)

    def worst(self, n: int = 5) -> list[Row]:
        """The n rows that do most to the training; not those of the largest error, which says little about it.

        Where several break it about equally, within a factor of two, one that makes a large error of small ones is
        first.
        """
        rows = sorted(self.rows, key=_order)
        if rows and rows[0].is_broken and not rows[0].phase:
            equal = [row for row in rows if row.gradient_error >= max(rows[0].gradient_error / 2, BROKEN)]
            largest = max(equal, key=lambda row: row.error)
            if largest.error > _MAGNIFIED * rows[0].error:
                rows.insert(0, rows.pop(rows.index(largest)))
        return rows[:n]

    @property
    def is_broken(self) -> bool:
        """Whether the lists make another training of it: something not finite, or gradients that are off by noise."""
        return self.first_nonfinite is not None or self.gradient_error >= BROKEN

    @property
    def broken(self) -> list[Row]:
        """The rows that break the training by themselves, the worst first."""
        return [row for row in self.worst(len(self.rows)) if row.is_broken]


def _order(row: Row) -> tuple[float, ...]:
    """What sorts the worst first: not finite, then the effect on gradients, on the loss, and the error itself."""
    effects = (row.gradient_error, row.loss_change, row.accumulated if row.error else 0.0, row.error)
    return (-bool(row.phase), *(-effect if not math.isnan(effect) else 0.0 for effect in effects))
