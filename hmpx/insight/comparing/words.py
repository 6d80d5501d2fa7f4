"""A comparison as text: the verdict, and the worst sites in a table."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence

from hmpx.insight.comparing.row import BROKEN, Found, Row, alike, number
from hmpx.insight.recording.alike import numberless
from hmpx.insight.recording.words import number as count
from hmpx.insight.recording.words import short_dtypes, short_places
from hmpx.insight.text_table import Column, table

_ROWS = 20  # of the table
_LINES = 8  # of ops that each break it


def as_text(found: Found, width: int) -> str:
    """What `print(comparison)` shows, in lines of `width` characters where words and paths allow."""
    if found.stopped:
        return "\n".join(verdict(found))
    rows = alike(found.worst(len(found.rows)))
    lines = [*verdict(found), "", *_table(rows[:_ROWS], width)]
    if len(rows) > _ROWS:
        lines.append(f"… and {len(rows) - _ROWS} rows that do less")
    if any("*" in row.module for row in rows[:_ROWS]):
        lines.append("* stands for the numbers of equal blocks, with the figures of the worst of them")
    if any(_is_estimate(row) for row in rows[:_ROWS]):
        lines.append("~ is an estimate from one run for all sites; the others are measured, each by runs of its own")
    return "\n".join(lines)


def verdict(found: Found) -> Iterator[str]:
    """What to conclude, in sentences."""
    if found.stopped:
        yield short_places(f"stopped: {found.stopped}.")
        return
    for row in alike([row for row in found.rows if row.raised]):
        yield f"raises under the lists: {row}. All else here is with FP32 there"
    error, scale = found.gradient_error, f"another training begins at {BROKEN:g}"
    if not math.isnan(error):
        said = "healthy" if not found.is_broken else "broken"
        if error < math.inf:
            yield f"{said}: gradient error {number(error)}, bias {number(found.gradient_bias)} ({scale})"
        else:
            yield "broken: the gradients have inf or NaN, and in FP32 they are finite"
    elif not math.isnan(found.loss):
        yield "gradient errors have no scale: give two batches or more that differ, and the noise between them is it"
    else:
        yield "no loss was given, so results alone are compared: give loss(model, *batch) to learn what they do to it"
    if not math.isnan(found.loss):
        change = f"{found.loss_change:+.2g}" if math.isfinite(found.loss_change) else "it is not finite"
        yield f"loss in FP32 {found.loss:.6g}, under the lists {change}"
    yield from _first(found)
    yield from _culprits(found)
    yield from _decisions(found)


def _first(found: Found) -> Iterator[str]:
    """Where inf or NaN is first seen."""
    first = found.first_nonfinite
    if first is not None:
        mended = {None: "", True: "; FP32 there mends it", False: "; FP32 there alone does not mend it"}[first.mended]
        victim = "; its inputs are wrong, alone it stays finite" if first.measured and not first.is_broken else ""
        yield f"first not finite: {first}{mended}{victim}{f'; {first.note}' if first.note else ''}"


def _culprits(found: Found) -> Iterator[str]:
    """Which ops break it alone, as far as that was measured, and what to do."""
    broken = [row for row in found.broken if not row.raised]
    alone, known = alike(broken), sum(row.measured for row in found.rows)
    if len(alone) > 1:
        yield f"{len(alone)} ops each break it alone:"
        yield from (f"  {row}" for row in alone[:_LINES])
        if alone[_LINES:]:
            yield f"  … and {len(alone) - _LINES} more"
    elif alone:
        yield f"one op breaks it alone: {alone[0]}"
    elif found.together:
        yield f"{count(known, 'op')} measured, none breaks it alone; these do together, and neither half of them does:"
        yield from (f"  {row}" for row in alike(found.together)[:_LINES])
        if alike(found.together)[_LINES:]:
            yield f"  … and {len(alike(found.together)) - _LINES} more"
    elif found.gradient_error >= BROKEN:
        yield f"{count(known, 'op')} measured, none breaks it alone; the others were not measured"
    if alone and found.rest < BROKEN:
        yield f"all other ops together do not: gradient error {number(found.rest)}"
    elif alone and found.rest >= BROKEN:
        yield f"all other ops together break it, too: gradient error {number(found.rest)}"
    if alone:
        yield f"keep in FP32: {_in_fp32(broken, found.rows)}; hmpx.tune finds the lists for all ops"


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


def _decisions(found: Found) -> Iterator[str]:
    """Decisions that the lists change, where something is broken."""
    changed = [row for row in found.rows if row.decisions]
    if changed and found.gradient_error >= BROKEN:
        yield "the lists change decisions, of which estimates (~) know nothing:"
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
