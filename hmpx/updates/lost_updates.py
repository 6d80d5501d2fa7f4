"""The result of `Attachment.updates()`: updates that round-to-nearest would lose, and how they were written instead."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from hmpx.errors import HmpxError, did_you_mean
from hmpx.updates.holding.settings import Settings
from hmpx.updates.stepping.update_counts import ULP, Totals, UpdateCounts
from hmpx.updates.update_table import THRESHOLD, UpdateRow, as_text, many, mean

SCHEMA = 1  # of the JSON


class Updates:
    """Counts of an attached optimizer's updates; made by `Attachment.updates`.

    Counts the steps of the optimizer from the next one on, until `close()`, the end of a `with` block, or the
    attachment's own end. What was counted stays. A step that raises does not count; of a method that rewrites weights
    beside `step` (`first_step` of SAM), each call is a step. Whoever reads the counts waits for the device; a
    step does not.

    Attributes:
        optimizer, weights: the class of the optimizer, and how the attachment holds weights.
        steps: how many were watched.
        active: whether steps are being counted.
        rows: one `UpdateRow` for each BF16 parameter, the one that would lose most first. ``updates[name]`` is the row
            of one parameter.
        lost: share of all updates that round-to-nearest would lose.
        needed: whether it would lose more than `THRESHOLD` of the updates of any parameter.

    `print` shows a table, which ends in an answer; `as_json()` is all of it for other programs.

    Example:
        >>> import torch, hmpx
        >>> weight = torch.nn.Parameter(torch.tensor([1.0, 0.01], dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([("weight", weight)], lr=0.001)
        >>> with hmpx.attach(optimizer, "nearest").updates() as updates:
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        >>> row = updates["weight"]  # the BF16 numbers next to 1.0 are 0.004 and 0.008 away, those next to 0.01 0.00006
        >>> row.lost, row.moved, updates.needed
        (0.5, 0.5, True)
    """

    def __init__(self, optimizer: str, settings: Settings) -> None:
        self.optimizer, self.weights, self._settings = optimizer, settings.weights, settings
        self.counts = UpdateCounts()  # for hmpx itself

    @property
    def steps(self) -> int:
        """How many steps were watched."""
        return self.counts.steps

    @property
    def active(self) -> bool:
        """Whether steps are being counted."""
        return self.counts.is_open

    def close(self) -> None:
        """Stop counting. The counts stay."""
        self.counts.is_open = False

    def __enter__(self) -> Updates:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def rows(self) -> list[UpdateRow]:
        """One row for each BF16 parameter: largest share of lost updates first, then longest without a move."""
        rows = [self._row(name, *found) for name, found in self.counts.read().items()]
        return sorted(rows, key=lambda row: (-row.lost, -row.idle_steps))

    def _row(self, name: str, total: Totals, last_move: int) -> UpdateRow:
        updates = max(total.updates, 1)
        error = total.error / updates / ULP
        return UpdateRow(
            name=name,
            elements=self.counts.elements[name],
            steps=self.steps,
            updates=total.updates,
            lost=total.lost / updates,
            moved=total.moved / updates,
            idle_steps=self.steps - last_move,
            size=total.size / updates / ULP,
            error=error,
            bias=total.bias / updates / ULP,
            bias_noise=math.sqrt(error / 2 / updates),
            nonfinite=total.nonfinite,
            no_gradient_steps=total.no_gradient,
            zero_gradient_steps=total.zero_gradient,
            weights=self._settings.way(name).weights,
        )

    def __getitem__(self, name: str) -> UpdateRow:
        rows = {row.name: row for row in self.rows}
        if name not in rows:
            raise HmpxError(
                f"no update of a parameter {name!r} was counted"
                + (did_you_mean(str(name), rows) if rows else f": {self.steps} steps were watched")
            )
        return rows[name]

    @property
    def lost(self) -> float:
        """Share of all updates that round-to-nearest would lose; 0.0 if there was none."""
        return mean(self.rows, "lost")

    @property
    def needed(self) -> bool:
        """Whether round-to-nearest would lose more than `THRESHOLD` of the updates of any parameter."""
        return any(row.lost > THRESHOLD for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """All counts as dicts, lists, strings and numbers.

        "schema" is 1; it grows when a name changes its meaning or goes away. "rows" has one object for each parameter,
        with the attributes of `UpdateRow` as keys; the rest are the attributes of this object, and "threshold".
        """
        rows = self.rows
        return {
            "schema": SCHEMA,
            "optimizer": self.optimizer,
            "weights": self.weights,
            "steps": self.steps,
            "lost": mean(rows, "lost"),
            "threshold": THRESHOLD,
            "needed": any(row.lost > THRESHOLD for row in rows),
            "rows": [asdict(row) for row in rows],
        }

    def __repr__(self) -> str:
        state = "" if self.active else ", closed"
        return f"<Updates of {self.optimizer}, weights={self.weights!r}: {self.steps} steps{state}>"

    def __str__(self) -> str:
        heading = f"{self.optimizer}, weights={self.weights!r}, {many(self.steps, 'step')}"
        return as_text(heading, self.rows)
