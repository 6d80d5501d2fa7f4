"""The updates of each parameter as a row, and the rows as a table that ends in an answer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Of the updates of a parameter: if round-to-nearest would lose more, it should not be used. Training runs that suffer
# from it lose half of them and more.
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
        weights: how the parameter is held, the `weights` of `hmpx.attach`.
        no_gradient_steps, zero_gradient_steps: in how many steps the parameter had no gradient, or one of zeros alone.
            A gradient that the step makes and takes away again is known by its updates.
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


def as_text(heading: str, rows: Sequence[UpdateRow]) -> str:
    """The table, remarks on it, and the answer. `rows`: the worst first."""
    if not sum(row.updates for row in rows):
        return "\n".join([f"{heading}: no update of a BF16 parameter", *_remarks(rows)])
    lines = [heading, *_table(rows[:_SHOWN])]
    if len(rows) > _SHOWN:
        lines.append(f"and {len(rows) - _SHOWN} more, which lose no larger share")
    said = [*_LEGEND, *_remarks(rows), "", _done(rows), _answer(rows)]
    return "\n".join([*lines, *(textwrap.fill(each, _WIDTH) for each in said)])


def mean(rows: Sequence[UpdateRow], name: str) -> float:
    """The mean of an attribute over the updates of all rows."""
    return sum(getattr(row, name) * row.updates for row in rows) / max(sum(row.updates for row in rows), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def many(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


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
    "of |update|; error, bias: mean of BF16 weight - FP32 result, without and with sign; these three in ulp of BF16.",
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
    """Remarks on parameters that do not move, or on silent harm."""
    remarks = []
    for row in rows:
        said = []
        if row.idle_steps > 1 or (row.idle_steps and row.idle_steps == row.steps):
            said.append(f"has not moved for {many(row.idle_steps, 'step')}")
        if row.no_gradient_steps:
            said.append(f"had no gradient in {row.no_gradient_steps} of {row.steps}")
        if row.zero_gradient_steps:
            said.append(f"had a gradient of zeros in {row.zero_gradient_steps} of {row.steps}")
        if row.nonfinite:
            said.append(f"got inf or NaN {many(row.nonfinite, 'time')}")
        if said:
            remarks.append(f"{row.name} {', '.join(said)}")
    if len(remarks) > _SHOWN:
        remarks[_SHOWN:] = [f"and so for {len(remarks) - _SHOWN} more parameters; `rows` has them"]
    return remarks


def _done(rows: Sequence[UpdateRow]) -> str:
    """How the updates that nearest would lose were written, for each way to hold parameters."""
    ways = dict.fromkeys(row.weights for row in rows if row.updates)
    return " ".join(_done_by(weights, [row for row in rows if row.weights == weights]) for weights in ways)


def _done_by(weights: str, rows: Sequence[UpdateRow]) -> str:
    if weights == "nearest":
        return "weights='nearest' loses them."
    if weights != "stochastic":
        where = {"split": "int16 halves", "split8": "int8 parts"}.get(weights, "FP32 masters")
        return f"weights={weights!r} loses none: the {where} beside the weights keep what BF16 cannot."
    updates, error = sum(row.updates for row in rows), mean(rows, "error")
    noise = math.sqrt(error / 2 / updates)
    return (
        f"weights='stochastic' keeps them in the mean: {_percent(mean(rows, 'moved'))} of the updates moved "
        f"a weight, with a bias of {mean(rows, 'bias'):+.5f} ulp, where chance makes ±{noise:.5f}."
    )


def _answer(rows: Sequence[UpdateRow]) -> str:
    """Whether stochastic rounding, or masters, are needed."""
    losing = [row for row in rows if row.lost > THRESHOLD]
    lost, limit = mean(rows, "lost"), f"{100 * THRESHOLD:g} %"
    word = "Yes" if lost > THRESHOLD else "For some parameters" if losing else "No"
    worst = f", worst in {losing[0].name!r} ({_percent(losing[0].lost)})" if losing else ""
    return (
        f"Do you need stochastic rounding, split or master here? {word}: round-to-nearest would lose {_percent(lost)} "
        f"of the updates, and more than {limit} in {len(losing)} of {many(len(rows), 'parameter')}{worst}."
    )
