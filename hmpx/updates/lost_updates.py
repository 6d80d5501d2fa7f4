"""The result of `Attachment.updates()`: updates that round-to-nearest would lose, and how they were written instead."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hmpx.errors import HmpxError, did_you_mean
from hmpx.updates.holding.settings import Settings
from hmpx.updates.stepping.update_counts import ULP, Totals, UpdateCounts

SCHEMA = 1  # of the JSON
# If round-to-nearest would lose more of a parameter's updates, it should not be used. Training runs that suffer from it
# lose half of them and more.
THRESHOLD = 0.05
_SHOWN, _NAME, _WIDTH = 20, 24, 80  # rows of the table, characters of a name in it, and of a line


@dataclass(frozen=True)
class UpdateRow:
    """The updates of one BF16 parameter, over the steps that were watched.

    An update is what an optimizer's step, computed in FP32, does to one element; those that are zero are left out.
    Shares and means are 0.0 where there was no update. *ulp* is the unit in the last place of BF16 at the FP32 result.

    Attributes:
        name: of the parameter.
        elements: that this rank holds.
        steps: that were watched.
        updates: how many there were, over all elements and steps.
        lost: share of the updates that round-to-nearest would lose: it would give the old weight back. Where there are
            masters, counted for a BF16 weight without one, which gets the same update.
        moved: share of the updates after which the BF16 weight was another one.
        idle_steps: how many steps ago an element of the BF16 weight last moved; all of `steps` if none did.
        size: mean of |FP32 result - weight before|, in ulp.
        error: mean of |BF16 weight - FP32 result|, in ulp. Of masters, the BF16 weight is a copy: nothing adds up.
        bias: mean of BF16 weight - FP32 result, in ulp.
        bias_noise: standard deviation that `bias` has by chance alone if each element is rounded up or down with the
            probability that keeps its expected value: sqrt(error / 2 / updates).
        nonfinite: results that were inf or NaN, which are no updates.
        no_gradient_steps, zero_gradient_steps: in how many steps the parameter had no gradient, or one of zeros alone.
            A gradient that the step makes and takes away again is known by its updates.
        weights: how the parameter is held, the `weights` of `hmpx.attach`.
    """

    name: str
    elements: int
    steps: int
    updates: int
    lost: float
    moved: float
    idle_steps: int
    size: float
    error: float
    bias: float
    bias_noise: float
    nonfinite: int
    no_gradient_steps: int
    zero_gradient_steps: int
    weights: str


class Updates:
    """Counts of an attached optimizer's updates; made by `Attachment.updates`.

    Counts the steps of the optimizer from the next one on, until `close()`, the end of a `with` block, or the
    attachment's own end. The counts stay. A step that raises does not count; of a method that rewrites weights
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
            hint = did_you_mean(str(name), rows) if rows else f": {self.steps} steps were watched"
            raise HmpxError(f"no update of a parameter {name!r} was counted{hint}")
        return rows[name]

    @property
    def lost(self) -> float:
        """Share of all updates that round-to-nearest would lose; 0.0 if there was none."""
        return _mean(self.rows, "lost")

    @property
    def needed(self) -> bool:
        """Whether round-to-nearest would lose more than `THRESHOLD` of the updates of any parameter."""
        return any(row.lost > THRESHOLD for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """Return all counts as dicts, lists, strings and numbers.

        "schema" is 1; it grows when a name changes its meaning or goes away. "rows" has one object for each parameter,
        with the attributes of `UpdateRow` as keys; the rest are the attributes of this object, and "threshold".
        """
        rows = self.rows
        return {
            "schema": SCHEMA,
            "optimizer": self.optimizer,
            "weights": self.weights,
            "steps": self.steps,
            "lost": _mean(rows, "lost"),
            "threshold": THRESHOLD,
            "needed": any(row.lost > THRESHOLD for row in rows),
            "rows": [asdict(row) for row in rows],
        }

    def __repr__(self) -> str:
        state = "" if self.active else ", closed"
        return f"<Updates of {self.optimizer}, weights={self.weights!r}: {self.steps} steps{state}>"

    def __str__(self) -> str:
        rows, heading = self.rows, f"{self.optimizer}, weights={self.weights!r}, {_many(self.steps, 'step')}"
        if not sum(row.updates for row in rows):
            return "\n".join([f"{heading}: no update of a BF16 parameter", *_remarks(rows)])
        lines = [heading, *_table(rows[:_SHOWN])]
        if len(rows) > _SHOWN:
            lines.append(f"and {len(rows) - _SHOWN} more, which lose no larger share")
        ways = dict.fromkeys(row.weights for row in rows if row.updates)
        written = " ".join(_written(weights, [row for row in rows if row.weights == weights]) for weights in ways)
        said = [_LEGEND, *_remarks(rows), "", written, _answer(rows)]
        return "\n".join([*lines, *(textwrap.fill(each, _WIDTH) for each in said)])


_COLUMNS: dict[str, Callable[[UpdateRow], str]] = {
    "parameter": lambda row: row.name if len(row.name) <= _NAME else "…" + row.name[1 - _NAME :],
    "elements": lambda row: str(row.elements),
    "lost": lambda row: _percent(row.lost),
    "moved": lambda row: _percent(row.moved),
    "idle": lambda row: str(row.idle_steps),
    "size": lambda row: f"{row.size:.3f}",
    "error": lambda row: f"{row.error:.3f}",
    "bias": lambda row: f"{row.bias:+.4f}",
}
_LEGEND = (
    "lost: what round-to-nearest would lose; moved: what moved a weight; idle: steps since anything moved; size: mean "
    "of |update|; error, bias: mean of BF16 weight - FP32 result, without and with sign; these three in ulp of BF16."
)


def _table(rows: Sequence[UpdateRow]) -> list[str]:
    cells = [list(_COLUMNS), *([column(row) for column in _COLUMNS.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for name, *numbers in cells:
        right = (text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *right]))
    return lines


def _remarks(rows: Sequence[UpdateRow]) -> list[str]:
    """Describe parameters that do not move, or that got inf or NaN."""
    remarks = []
    for row in rows:
        said = []
        if row.idle_steps > 1 or (row.idle_steps and row.idle_steps == row.steps):
            said.append(f"has not moved for {_many(row.idle_steps, 'step')}")
        if row.no_gradient_steps:
            said.append(f"had no gradient in {row.no_gradient_steps} of {row.steps}")
        if row.zero_gradient_steps:
            said.append(f"had a gradient of zeros in {row.zero_gradient_steps} of {row.steps}")
        if row.nonfinite:
            said.append(f"got inf or NaN {_many(row.nonfinite, 'time')}")
        if said:
            remarks.append(f"{row.name} {', '.join(said)}")
    if len(remarks) > _SHOWN:
        remarks[_SHOWN:] = [f"and so for {len(remarks) - _SHOWN} more parameters; `rows` has them"]
    return remarks


def _written(weights: str, rows: Sequence[UpdateRow]) -> str:
    """Say how the updates that nearest would lose were written, for one way to hold parameters."""
    if weights == "nearest":
        return "weights='nearest' loses them."
    if weights != "stochastic":
        where = {"split": "int16 halves", "split8": "int8 parts"}.get(weights, "FP32 masters")
        return f"weights={weights!r} loses none: the {where} beside the weights keep what BF16 cannot."
    noise = math.sqrt(_mean(rows, "error") / 2 / sum(row.updates for row in rows))
    return (
        f"weights='stochastic' keeps them in the mean: {_percent(_mean(rows, 'moved'))} of the updates moved "
        f"a weight, with a bias of {_mean(rows, 'bias'):+.5f} ulp, where chance makes ±{noise:.5f}."
    )


def _answer(rows: Sequence[UpdateRow]) -> str:
    """Say whether stochastic rounding, or masters, are needed."""
    losing = [row for row in rows if row.lost > THRESHOLD]
    lost, limit = _mean(rows, "lost"), f"{100 * THRESHOLD:g} %"
    word = "Yes" if lost > THRESHOLD else "For some parameters" if losing else "No"
    worst = f", worst in {losing[0].name!r} ({_percent(losing[0].lost)})" if losing else ""
    return (
        f"Do you need stochastic rounding, split or master here? {word}: round-to-nearest would lose {_percent(lost)} "
        f"of the updates, and more than {limit} in {len(losing)} of {_many(len(rows), 'parameter')}{worst}."
    )


def _mean(rows: Sequence[UpdateRow], name: str) -> float:
    """Return the mean of an attribute over the updates of all rows."""
    return sum(getattr(row, name) * row.updates for row in rows) / max(sum(row.updates for row in rows), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"
