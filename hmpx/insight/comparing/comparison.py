"""`Comparison`: what `compare` found, by call site, by op and by module."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BROKEN = 0.1  # gradient error in units of the noise between batches; healthy ops lie at 0.001 to 0.01
SCHEMA = 1
_MAGNIFIED = 10  # an error of an op alone so many times another's is its own doing


@dataclass(frozen=True)
class Row:
    """One call site under the lists beside itself in FP32; or the sum over an op or a module.

    Attributes:
        op: its list name; "to" is a cast by hand. where: the caller's line, as file:line. module: the dotted name of
            the module that called it.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        dtypes: what came in, what the op ran on, and what came out.
        calls: how many, over all batches.
        error: relative L2 error of the op alone: its FP32 inputs, cast as the lists say, beside the same in FP32.
        accumulated: relative L2 error of its result in the run under the lists, against that of the run in FP32.
        ulp: the largest error of the op alone, in units in the last place of the low dtype.
        bias, spread: mean and standard deviation of that error, in units of the result's root mean square.
        loss_change: what the error of the op alone does to the loss, to first order: root mean square over batches.
        gradient_error: what it does to the gradients of the parameters, in units of the noise between batches.
        gradient_bias: the part that batches do not average out, in units of the noise of their mean.
        measured: whether loss_change and gradient_error come from runs with this op alone in low precision. Else they
            are estimates, the second right within a factor of two or so.
        nonfinite: results that are not finite under the lists, and finite in FP32. phase: "forward" or "backward",
            where that begins. mended: whether FP32 at this op alone keeps everything finite; None where it was not
            tried.
        note: what else there is to say, in words.

        is_broken: whether it breaks the training by itself, as far as is known.

    What does not exist is NaN: the effect on a loss where there is none, noise where there is one batch.

    Example:
        >>> batches = [(torch.randn(8, 4),) for _ in range(2)]
        >>> found = hmpx.compare(model, batches, lambda model, x: model(x).square().mean())
        >>> row = found.rows[0]
        >>> row.op, row.rule, row.calls, row.error < 0.01, row.is_broken
        ('linear', 'bf16', 2, True, False)
    """

    op: str
    where: str = ""
    module: str = ""
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    calls: int = 0
    error: float = 0.0
    accumulated: float = 0.0
    ulp: float = 0.0
    bias: float = 0.0
    spread: float = 0.0
    loss_change: float = math.nan
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
    measured: bool = False
    nonfinite: int = 0
    phase: str = ""
    mended: bool | None = None
    note: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether it breaks the training by itself, as far as is known."""
        return bool(self.phase) or self.gradient_error >= BROKEN

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        inside = f" in {self.module}" if self.module else ""
        effect = f"gradient error {_number(self.gradient_error)} of the noise, loss {_number(self.loss_change)}"
        if self.phase:
            effect = f"not finite in the {self.phase} pass, where FP32 is"
        return f"{place}{self.op}{inside}: {effect}, error of the op alone {_number(self.error)}"


@dataclass(frozen=True)
class Comparison:
    """What lists do to a model, op by op. It prints as a table, the worst first.

    Attributes:
        rows: a `Row` for each call site. gradient_error, gradient_bias: of the lists as a whole, measured, in units of
            the noise between batches; above 0.1 the training is another one. NaN without a loss or with one batch.
        loss, loss_change: the FP32 loss, and what the lists add to it, means over batches.
        first_nonfinite: the row of the op where something first is not finite that is finite in FP32; None if nothing
            is.
        passes: how many runs of the model it took. policy: the lists, as a file.

    `by_op()` and `by_module()` are sums, `worst(n)` the n rows that do most to the training, `broken` those that break
    it alone; `is_broken` says whether the lists as a whole do. `json(path)` saves everything, `as_json()` is the same
    as objects.

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

    def as_json(self) -> dict[str, Any]:
        """The attributes, with `by_op` and `by_module`; what is not a number is null."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name[0] != "_"}
        rows = {"rows": self.rows, "by_op": self.by_op(), "by_module": self.by_module()}
        first = None if self.first_nonfinite is None else asdict(self.first_nonfinite)
        return _plain(
            {"schema": SCHEMA, **found, "first_nonfinite": first} | {k: [*map(asdict, v)] for k, v in rows.items()}
        )

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save everything as JSON, by the names of the attributes."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        return "\n".join([*self._verdict(), "", *_table(self.worst(20))])

    def _verdict(self) -> list[str]:
        """What to conclude, in sentences."""
        lines = []
        if not math.isnan(self.loss):
            lines.append(f"FP32 loss {self.loss:.6g}; under the lists {self.loss_change:+.2g}")
        if not math.isnan(self.gradient_error):
            verdict = "healthy" if self.gradient_error < BROKEN else "another training"
            error, bias = _number(self.gradient_error), _number(self.gradient_bias)
            lines.append(
                f"gradient error {error} of the noise between batches, bias {bias} of that of their mean: {verdict}"
            )
        if self.first_nonfinite is not None:
            row = self.first_nonfinite
            mended = {None: "", True: "; FP32 there mends it", False: "; FP32 there alone does not mend it"}[row.mended]
            note = f"; {row.note}" if row.note else ""
            lines.append(f"first not finite: {row}{mended}{note}")
        alone = [row for row in self.broken if row.measured or row.phase]
        if len(alone) > 1:
            lines.append(f"{len(alone)} ops each break it alone:")
            lines += [f"  {row}" for row in alone[:8]]
        elif alone and not alone[0].phase:
            lines.append(f"one op breaks it alone: {alone[0]}")
        elif self.gradient_error >= BROKEN and not alone:
            lines.append("no op breaks it alone: many errors add up, those at the top of the table first")
        return lines


def _order(row: Row) -> tuple[float, ...]:
    """What sorts the worst first: not finite, then the effect on gradients, on the loss, and the error itself."""
    effects = (row.gradient_error, row.loss_change, row.accumulated if row.error else 0.0, row.error)
    return (-bool(row.phase), *(-effect if not math.isnan(effect) else 0.0 for effect in effects))


def _table(rows: Sequence[Row]) -> list[str]:
    columns: dict[str, Callable[[Row], str]] = {
        "op": lambda row: row.op,
        "gradient error": lambda row: _number(row.gradient_error) + ("" if row.measured else " ~"),
        "loss change": lambda row: _number(row.loss_change),
        "error": lambda row: _number(row.error),
        "accumulated": lambda row: _number(row.accumulated),
        "dtypes": lambda row: row.dtypes,
        "module": lambda row: row.module,
        "line": lambda row: _short(row.where),
    }
    cells = [list(columns), *([get(row) for get in columns.values()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _short(where: str) -> str:
    return os.path.basename(where)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"


def _plain(value: Any) -> Any:
    """Without NaN and inf, which JSON does not have: null, and "inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
