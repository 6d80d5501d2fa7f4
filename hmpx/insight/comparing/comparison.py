"""`Comparison`: what `compare` found, to be printed and saved."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hmpx.insight.comparing.row import BROKEN, FELT, MAGNIFIED, Row, alike, number, order
from hmpx.insight.module_names import numberless
from hmpx.insight.pages import filled
from hmpx.insight.text_table import Column, short_dtypes, short_places, table, terminal_width
from hmpx.insight.text_table import number as count

SCHEMA = 2
_ROWS = 20  # of the table
_LINES = 8  # of ops that each break it
_WIDTH = 110  # of the text that stands in the page for readers without scripts


@dataclass(frozen=True)
class Comparison:
    """What lists do to a model, op by op. It prints as a table, the worst first.

    Attributes:
        rows: a `Row` for each call site. gradient_error, gradient_bias: of the lists as a whole, measured, in units of
            the noise between batches; above 0.2 the training is another one. NaN without a loss or with one batch.
        loss, loss_change: the FP32 loss, and what the lists add to it, means over batches.
        first_nonfinite: the row of the op where something first is not finite that is finite in FP32; None if nothing
            is. It is where that is seen; what is to blame stands in `broken`.
        rest: the gradient error of all ops together that do not break it alone, in one batch; NaN where that was not
            measured. together: the rows of a group that breaks it together where no single op does, as far as found.
        stopped: why the comparison could not go on, in words: FP32 itself is not finite, or the program raises under
            the lists outside of any op; "" where it did.
        passes: how many runs of the model it took. policy: the lists, as a file.

    `by_op()` and `by_module()` are sums, `worst(n)` the n rows that do most to the training, `broken` those that break
    it alone; `is_broken` says whether the lists as a whole do. `json(path)` saves everything, `as_json()` is the same
    as objects, `html(path)` a page.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> found = hmpx.compare(model, batches, loss)
        >>> [(row.op, row.rule, row.dtypes) for row in found.rows][0]
        ('linear', 'bf16', 'float32 -> bfloat16')
        >>> found.gradient_error < 0.1, found.first_nonfinite
        (True, None)
    """

    rows: tuple[Row, ...]
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
    loss: float = math.nan
    loss_change: float = math.nan
    first_nonfinite: Row | None = None
    rest: float = math.nan
    together: tuple[Row, ...] = ()
    stopped: str = ""
    passes: int = 0
    policy: str = ""
    _ops: tuple[Row, ...] = field(default=(), repr=False)
    _modules: tuple[Row, ...] = field(default=(), repr=False)

    def by_op(self) -> list[Row]:
        """A row for each op, the worst first: errors of its sites together, effects added up with their signs."""
        return sorted(self._ops, key=order)

    def by_module(self) -> list[Row]:
        """A row for each module, the worst first. What its submodules call counts for them alone."""
        return sorted(self._modules, key=order)

    def worst(self, n: int = 5) -> list[Row]:
        """The n rows that do most to the training; not those of the largest error, which says little about it.

        Where several break it about equally, within a factor of two, one that makes a large error of small ones is
        first.
        """
        rows = sorted(self.rows, key=order)
        if rows and rows[0].gradient_error >= FELT and not rows[0].phase:
            equal = [row for row in rows if row.gradient_error >= max(rows[0].gradient_error / 2, FELT)]
            largest = max(equal, key=lambda row: row.error)
            if largest.error > MAGNIFIED * rows[0].error:
                rows.insert(0, rows.pop(rows.index(largest)))
        return rows[:n]

    @property
    def is_broken(self) -> bool:
        """Whether there is another training or none: an op raises, something is not finite, gradients are off."""
        raised = any(row.raised for row in self.rows)
        return bool(self.stopped) or raised or self.first_nonfinite is not None or self.gradient_error >= BROKEN

    @property
    def broken(self) -> list[Row]:
        """The rows that break the training by themselves, the worst first. Estimates do not count."""
        return [
            row for row in self.worst(len(self.rows)) if row.is_broken and (row.measured or row.phase or row.raised)
        ]

    def as_json(self) -> dict[str, Any]:
        """The attributes, with `by_op` and `by_module`; what is not a number is null."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name[0] != "_"}
        rows = {"rows": self.rows, "by_op": self.by_op(), "by_module": self.by_module()}
        first = None if self.first_nonfinite is None else asdict(self.first_nonfinite)
        return plain(
            {"schema": SCHEMA, **found, "first_nonfinite": first} | {k: [*map(asdict, v)] for k, v in rows.items()}
        )

    def html(self, path: str | os.PathLike[str]) -> None:
        """Save as one HTML page that needs no network and no other file."""
        values = {**self.as_json(), "worst": plain([asdict(row) for row in self.worst(len(self.rows))])}
        shown = {**values, "verdict": list(verdict(self)), "broken": FELT, "is_broken": self.is_broken}
        page = filled(str(__package__), "compare", as_text(self, _WIDTH), shown)
        Path(path).write_text(page, encoding="utf-8")

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save everything as JSON, by the names of the attributes."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return as_text(self, terminal_width())


def plain(value: Any) -> Any:
    """Without NaN and inf, which JSON does not have: null, and "inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def as_text(found: Comparison, width: int) -> str:
    """What `print(comparison)` shows, in lines of `width` characters where words and paths allow."""
    if found.stopped:
        return "\n".join(verdict(found))
    rows = alike(found.worst(len(found.rows)))
    lines = [*verdict(found), "", *_table(rows[:_ROWS], width)]
    if len(rows) > _ROWS:
        lines.append(f"… and {len(rows) - _ROWS} rows that do less")
    if any("*" in row.module for row in rows[:_ROWS]):
        lines.append("* stands for the numbers of equal blocks; the figures are those of the worst of these blocks")
    if any(_is_estimate(row) for row in rows[:_ROWS]):
        lines.append("~ marks an estimate; the other figures are measured, in runs of this op alone")
    return "\n".join(lines)


def verdict(found: Comparison) -> Iterator[str]:
    """What to conclude, in sentences."""
    if found.stopped:
        yield short_places(f"stopped: {found.stopped}.")
        return
    for row in alike([row for row in found.rows if row.raised]):
        yield f"raises under the lists: {row}. The comparison goes on with FP32 there"
    error, scale = found.gradient_error, f"another training begins at {BROKEN:g}"
    if not math.isnan(error):
        said = "broken" if found.is_broken else "tolerable" if error >= FELT else "healthy"
        if error < math.inf:
            yield f"{said}: gradient error {number(error)}, bias {number(found.gradient_bias)} ({scale})"
        else:
            yield "broken: the gradients have inf or NaN, and in FP32 they are finite"
    elif not math.isnan(found.loss):
        yield "gradient errors have no unit: give two batches or more that differ; the noise between them is the unit"
    else:
        yield "only results are compared: give loss(model, *batch) to see what errors do to the training"
    if not math.isnan(found.loss):
        finite = math.isfinite(found.loss_change)
        change = f"the lists change it by {found.loss_change:+.2g}" if finite else "under the lists it is not finite"
        yield f"the loss is {found.loss:.6g} in FP32; {change}"
    yield from _first(found)
    yield from _culprits(found)
    yield from _decisions(found)


def _first(found: Comparison) -> Iterator[str]:
    """Where inf or NaN is first seen."""
    first = found.first_nonfinite
    if first is not None:
        victim = "; alone it stays finite, so its inputs are wrong" if first.measured and not first.is_broken else ""
        yield f"first inf or NaN: {first}{victim}{f'; {first.note}' if first.note else ''}"


def _culprits(found: Comparison) -> Iterator[str]:
    """Which ops break it alone, as far as that was measured, and what to do."""
    broken = [row for row in found.broken if not row.raised]
    verb = "break" if found.is_broken else "harm"
    alone, known = alike(broken), sum(row.measured for row in found.rows)
    if len(alone) > 1:
        yield f"{len(alone)} ops each {verb} the training by themselves:"
        yield from _listed(alone)
    elif alone:
        yield f"one op {verb}s the training by itself: {alone[0]}"
    elif found.together:
        yield f"{_measured(known)}; these {verb} it together, and neither half of them does:"
        yield from _listed(alike(found.together))
    elif found.gradient_error >= FELT:
        yield f"{_measured(known)}; the others were not measured"
    if alone and found.rest < FELT:
        yield f"all other ops together do not {verb} it: gradient error {number(found.rest)}"
    elif alone and found.rest >= FELT:
        yield f"all other ops together {verb} it, too: gradient error {number(found.rest)}"
    if alone:
        yield f"keep in FP32: {_in_fp32(broken, found.rows)}; or let hmpx.tune find the lists"


def _measured(ops: int) -> str:
    return f"{count(ops, 'op was', 'ops were')} measured, and none breaks the training by itself"


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"  {row}" for row in rows[:_LINES])
    if rows[_LINES:]:
        yield f"  … and {len(rows) - _LINES} more"


def _in_fp32(broken: Sequence[Row], rows: Sequence[Row]) -> str:
    """What is to run in FP32: a name, with its module where it does no harm in others; or a cast to take away."""
    said: dict[str, None] = {}
    for row in alike(broken):
        others = [each for each in rows if each.op == row.op and each not in broken and each.error]
        elsewhere = any(numberless(each.module) != row.module for each in others)
        if row.op == "to":
            said[f"the cast by hand at {short_places(row.where)}"] = None
        else:
            said[f"{row.op} in {row.module}" if elsewhere and row.module else row.op] = None
    return ", ".join(said)


def _decisions(found: Comparison) -> Iterator[str]:
    """Decisions that the lists change, where something is broken."""
    changed = [row for row in found.rows if row.decisions]
    if changed and found.gradient_error >= FELT:
        yield "the lists change decisions, which no estimate (~) sees:"
        for row in alike(changed)[:_LINES]:
            inside = f" in {row.module}" if row.module else ""
            yield short_places(f"  {row.where}: {row.op}{inside}: {row.decisions}")


def _table(rows: Sequence[Row], width: int) -> list[str]:
    def each(text: Callable[[Row], str]) -> list[str]:
        return [text(row) for row in rows]

    return table(
        [
            Column("op", each(lambda row: row.op), least=14),
            Column("gradient error", each(_gradient_error)),
            Column("loss change", each(lambda row: number(row.loss_change)), rank=1),
            Column("error", each(lambda row: number(row.error))),
            Column("accumulated", each(lambda row: number(row.accumulated)), rank=3),
            Column("rule", each(lambda row: row.rule or "-"), rank=4),
            Column("dtypes", each(lambda row: short_dtypes(row.dtypes)), least=12, rank=2),
            Column("module", each(lambda row: row.module), least=12, from_left=True, rank=1),
            Column("line", each(lambda row: os.path.basename(row.where)), least=14, from_left=True),
        ],
        width,
    )


def _is_estimate(row: Row) -> bool:
    return not row.measured and row.gradient_error > 0


def _gradient_error(row: Row) -> str:
    return number(row.gradient_error) + (" ~" if _is_estimate(row) else "")
