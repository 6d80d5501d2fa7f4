"""A comparison as text: the verdict, and the worst sites in a table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence

from hmpx.insight.comparing.found import Found
from hmpx.insight.comparing.row import BROKEN, Row, number
from hmpx.insight.recording.words import short_dtypes
from hmpx.insight.text_table import Column, table

_ROWS = 20  # of the table
_LINES = 8  # of ops that each break it


def as_text(found: Found, width: int) -> str:
    """What `print(comparison)` shows, in lines of `width` characters where words and paths allow."""
    lines = [*verdict(found), "", *_table(found.worst(_ROWS), width)]
    if len(found.rows) > _ROWS:
        lines.append(f"… and {len(found.rows) - _ROWS} sites that do less")
    if any(not row.measured and row.gradient_error > 0 for row in found.worst(_ROWS)):
        lines.append("~ an estimate from one run for all sites; the others are measured, each by runs of its own")
    return "\n".join(lines)


def verdict(found: Found) -> Iterator[str]:
    """What to conclude, in sentences."""
    if not math.isnan(found.loss):
        yield f"FP32 loss {found.loss:.6g}; under the lists {found.loss_change:+.2g}"
    if not math.isnan(found.gradient_error):
        said = "healthy" if found.gradient_error < BROKEN else "another training"
        error, bias = number(found.gradient_error), number(found.gradient_bias)
        yield f"gradient error {error} of the noise between batches, bias {bias} of that of their mean: {said}"
    elif not math.isnan(found.loss):
        yield "gradient errors have no scale: give two batches or more that differ, and the noise between them is it"
    first = found.first_nonfinite
    if first is not None:
        mended = {None: "", True: "; FP32 there mends it", False: "; FP32 there alone does not mend it"}[first.mended]
        yield f"first not finite: {first}{mended}{f'; {first.note}' if first.note else ''}"
    alone = [row for row in found.broken if row.measured or row.phase]
    if len(alone) > 1:
        yield f"{len(alone)} ops each break it alone:"
        yield from (f"  {row}" for row in alone[:_LINES])
    elif alone and not alone[0].phase:
        yield f"one op breaks it alone: {alone[0]}"
    elif found.gradient_error >= BROKEN and not alone:
        yield "no op breaks it alone: many errors add up, those at the top of the table first"


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


def _gradient_error(row: Row) -> str:
    estimated = not row.measured and row.gradient_error > 0
    return number(row.gradient_error) + (" ~" if estimated else "")
