"""A record as text: the dearest sites in a table, and what calls for attention beneath it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hmpx.insight.recording import fp8
from hmpx.insight.recording.alike import alike
from hmpx.insight.recording.recorded import Recorded
from hmpx.insight.recording.site import RoundTrip, Site
from hmpx.insight.recording.words import at, milliseconds, number, short_dtypes, short_places, size, times
from hmpx.insight.text_table import Column, table

_ROWS = 20  # of the table
_LINES = 8  # of what stands beneath it, of each kind
NOTHING_CONVERTED = (
    "Nothing was converted while this recorded, so that torch's ops ran as they are, and were not seen.\n"
    "Put a conversion in force, before or inside: `with hmpx.convert(), hmpx.record() as log:`, or a recipe by\n"
    "`hmpx.prepare` or `python -m hmpx record --recipe NAME script.py`."
)


def as_text(log: Recorded, width: int) -> str:
    """What `print(log)` shows, in lines of `width` characters where words and paths allow."""
    if not log.policy:
        return NOTHING_CONVERTED
    if not log.sites:
        return "\n".join(["No op was called while this recorded.", *_beneath(log)])
    rows = sorted(alike(log.sites), key=lambda site: site.seconds, reverse=True)
    lines = [*in_words(log), "", *_table(rows[:_ROWS], width)]
    if rows[_ROWS:]:
        rest = sum(site.seconds for site in rows[_ROWS:])
        lines.append(f"… and {len(rows) - _ROWS} more, {milliseconds(rest)} ms together")
    return "\n".join([*lines, *_beneath(log)])


def in_words(log: Recorded) -> Iterator[str]:
    """The totals."""
    sums = log.totals
    ops = len({site.op for site in log.sites})
    steps = f" in {number(log.steps, 'step')}" if log.steps else ""
    yield f"{number(sums['calls'], 'call')} of {number(ops, 'op')} at {number(len(log.sites), 'site')}{steps}"
    looked_at = sums["casts"] + sums["casts_avoided"]
    yield (
        f"{sums['casts']} of {looked_at} tensors under a rule were cast: {size(sums['bytes_cast'])} moved in "
        f"{milliseconds(sums['cast_seconds'])} ms, {100 * sums['cast_share']:.0f} % of the time of casts and ops"
    )


def _table(rows: list[Site], width: int) -> list[str]:
    def each(text: Callable[[Site], str]) -> list[str]:
        return [text(site) for site in rows]

    return table(
        [
            Column("op", each(lambda site: site.op), least=14),
            Column("line", each(lambda site: os.path.basename(site.where)), least=14, from_left=True),
            Column("module", each(lambda site: site.module), least=12, from_left=True, rank=1),
            Column("rule", each(lambda site: site.rule or "-"), rank=5),
            Column("dtypes", each(lambda site: short_dtypes(site.dtypes)), least=17),
            Column("calls", each(lambda site: str(site.calls)), right=True, rank=3),
            Column("casts", each(lambda site: str(site.casts)), right=True, rank=2),
            Column("moved", each(lambda site: size(site.bytes_cast)), right=True, rank=4),
            Column("casts ms", each(lambda site: milliseconds(site.cast_seconds)), right=True),
            Column("op ms", each(lambda site: milliseconds(site.op_seconds)), right=True),
        ],
        width,
    )


def _beneath(log: Recorded) -> Iterator[str]:
    """The lines that call for attention, each kind under its heading; empty if there are none."""
    for heading, lines in attention(log):
        yield ""
        yield heading
        yield from (f"  {short_places(line)}" for line in lines[:_LINES])
        if lines[_LINES:]:
            yield f"  … and {len(lines) - _LINES} more"
    if log.unmatched_of_hmpx:
        yield ""
        count = number(len(log.unmatched_of_hmpx), "name")
        yield f"{count} of the lists that come with hmpx matched no call, as is usual"


def attention(log: Recorded) -> Iterator[tuple[str, list[str]]]:
    """Headings with their lines, the worst first."""
    first = log.first_nonfinite
    if first is not None:
        others = sum(site.nonfinite is not None for site in log.sites) - 1
        after = f"; later in {number(others, 'more site')}" if others else ""
        yield "First result with an inf or a NaN", [f"{at(first)}, in call {first.nonfinite}{after}"]
    yield from _kind(
        "In a dtype that nobody chose",
        (f"{at(site)}: {site.unchosen} ({times(site.calls)})" for site in alike(log.unchosen)),
    )
    yield from _kind("Cast there and back, though no list asks for both", _trips(log, listed=False))
    yield from _kind("Updates of weights that round-to-nearest would lose", map(_lost, log.updates))
    yield from _kind("Ops that no wrapper reaches", log.escaped)
    yield from _kind("In your fp8 list, and computed in BF16", fp8.in_low(log.sites))
    yield from _kind("Casts to FP8", fp8.reached(log.sites))
    yield from _kind("Names in your lists that no call matched", log.unmatched)
    yield from _kind("Cast there and back, as the lists ask", _trips(log, listed=True))


def _kind(heading: str, lines: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    found = list(lines)
    if found:
        yield heading, found


def _lost(updates: dict[str, Any]) -> str:
    """What `Attachment.updates()` has counted, as it stands in the record."""
    rows, answer = updates["rows"], "needs no stochastic rounding"
    worst = max(rows, key=lambda row: row["lost"], default=None)
    if worst is not None and updates["needed"]:
        answer = f"most of {worst['name']!r}, {100 * worst['lost']:.0f} %"
    head = f"{updates['optimizer']}, weights={updates['weights']!r}, {number(updates['steps'], 'step')}"
    return f"{head}: {100 * updates['lost']:.0f} % of all; {answer}"


def _trips(log: Recorded, listed: bool) -> list[str]:
    trips = [trip for trip in log.round_trips if trip.listed is listed]
    return [str(trip) for trip in sorted(_merged(trips), key=lambda trip: trip.bytes, reverse=True)]


def _merged(trips: list[RoundTrip]) -> list[RoundTrip]:
    """Sites of equal blocks (the same lines in several modules) as one."""
    found: dict[tuple, RoundTrip] = {}
    for trip in trips:
        key = trip.first, trip.then, trip.ops, trip.dtypes
        known = found.setdefault(key, RoundTrip(trip.first, trip.then, trip.ops, trip.dtypes, listed=trip.listed))
        known.calls += trip.calls
        known.bytes += trip.bytes
    return list(found.values())
