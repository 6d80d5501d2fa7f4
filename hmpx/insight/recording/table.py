"""A record as text and as a page: the dearest sites first, and beneath them the lines that call for attention."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hmpx.insight.pages import bars, box, closed, grid, page
from hmpx.insight.recording.recorded import LogValues, RoundTrip, Site, alike
from hmpx.insight.text_table import (
    Column,
    milliseconds,
    number,
    short_dtypes,
    short_place,
    short_places,
    size,
    table,
    times,
)

_ROWS = 20  # of the table
_LINES = 8  # of each kind beneath it
_WIDTH = 110  # of the text in the page for readers without scripts
_AS_ASKED = "Cast there and back, as the lists ask"
NOTHING_CONVERTED = (
    "Nothing was converted while this recorded, so that torch's ops ran as they are, and were not seen.\n"
    "Put a conversion in force, before or inside: `with hmpx.convert(), hmpx.record() as log:`, or a recipe by\n"
    "`hmpx.prepare` or `python -m hmpx record --recipe NAME script.py`."
)


def as_text(log: LogValues, width: int) -> str:
    """Return the text of `print(log)`, in lines of `width` characters where words and paths allow."""
    if not log.policy:
        return NOTHING_CONVERTED
    if not log.sites:
        return "\n".join(["No op was called while this recorded.", *_beneath(log)])
    rows = sorted(alike(log.sites), key=lambda site: site.seconds, reverse=True)
    lines = [*_totals(log), "", *_table(rows[:_ROWS], width)]
    if rows[_ROWS:]:
        rest = sum(site.seconds for site in rows[_ROWS:])
        lines.append(f"… and {len(rows) - _ROWS} more, {milliseconds(rest)} ms together")
    return "\n".join([*lines, *_beneath(log)])


def as_page(log: LogValues) -> str:
    """Return one HTML page that holds all sites and findings."""
    sections = [box(heading, map(short_places, lines), wrong=heading != _AS_ASKED) for heading, lines in attention(log)]
    costs = [
        (f"{site.op} {site.module or short_place(site.where)}", site.cast_seconds, milliseconds(site.cast_seconds))
        for site in sorted(alike(log.sites), key=lambda site: site.cast_seconds, reverse=True)[:_ROWS]
        if site.cast_seconds
    ]
    sections += [
        bars("Where the time of casts goes, in ms", "Equal blocks stand together.", costs),
        grid("Every site", _COLUMNS, map(_row, log.sites), order="op ms"),
    ]
    if log.unmatched_of_hmpx:
        sections.append(closed("Names in the lists of hmpx that no call matched", ", ".join(log.unmatched_of_hmpx)))
    if log.policy:
        sections.append(closed("The lists in force, as one file that hmpx reads", log.policy))
    about = " · ".join(f"{name} {version}" for name, version in log.about.items())
    lines = [about, *(_totals(log) if log.policy else [NOTHING_CONVERTED])]
    return page("record", "What ran in which precision", lines, sections, as_text(log, _WIDTH))


_COLUMNS = {
    **{"op": "text", "line": "end", "module": "end", "rule": "text", "dtypes": "dtypes", "calls": "number"},
    **dict.fromkeys(("casts", "avoided", "kB moved", "casts ms", "op ms"), "number"),
    "inf, NaN": "text",
}


def _row(site: Site) -> list[Any]:
    """Return the cells of a site, and notes."""
    costs = site.calls, site.casts, site.casts_avoided, site.bytes_cast / 1e3
    notes = site.where, f"called as {site.entry}", site.reason, f"shapes {'; '.join(site.shapes)}", site.unchosen
    nonfinite = f"call {site.nonfinite}" if site.nonfinite else ""
    return [
        *(site.op, os.path.basename(site.where), site.module, site.rule, short_dtypes(site.dtypes), *costs),
        *(1e3 * site.cast_seconds, 1e3 * site.op_seconds, nonfinite, notes),
    ]


def _totals(log: LogValues) -> Iterator[str]:
    sums = log.totals
    ops = len({site.op for site in log.sites})
    steps = f" in {number(log.steps, 'step')}" if log.steps else ""
    yield f"{number(sums['calls'], 'call')} of {number(ops, 'op')} at {number(len(log.sites), 'site')}{steps}"
    yield (
        f"{number(sums['casts'], 'cast')}, {sums['casts_avoided']} avoided: {size(sums['bytes_cast'])} moved in "
        f"{milliseconds(sums['cast_seconds'])} ms, {100 * sums['cast_share']:.0f} % of the time of casts and ops"
    )


def _table(rows: list[Site], width: int) -> list[str]:
    def each(text: Callable[[Site], str]) -> list[str]:
        return [text(site) for site in rows]

    return table(
        [
            *place_columns(rows),
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


def place_columns(sites: Sequence[Site]) -> list[Column]:
    """Return the columns that say where each site is."""
    return [
        Column("op", [site.op for site in sites], least=14),
        Column("line", [os.path.basename(site.where) for site in sites], least=14, from_left=True),
        Column("module", [site.module for site in sites], least=12, from_left=True, rank=1),
    ]


def _beneath(log: LogValues) -> Iterator[str]:
    """Yield the lines that call for attention, each kind under its heading."""
    for heading, lines in attention(log):
        yield from ("", heading, *(f"  {short_places(line)}" for line in lines[:_LINES]))
        if lines[_LINES:]:
            yield f"  … and {len(lines) - _LINES} more"
    if log.unmatched_of_hmpx:
        names = number(len(log.unmatched_of_hmpx), "name")
        yield from ("", f"{names} of the lists that come with hmpx matched no call: they serve many models")


def attention(log: LogValues) -> Iterator[tuple[str, list[str]]]:
    """Yield headings with their lines, the worst first."""
    for heading, lines in {
        "First result with an inf or a NaN": _nonfinite(log),
        "In a dtype that nobody chose": (
            f"{site.place}: {site.unchosen} ({times(site.calls)})" for site in alike(log.unchosen)
        ),
        "Cast outside of any model: put `with hmpx.disable_casts():` around it, or say where: model": (
            f"{site.place} ({times(site.outside)})" for site in alike(log.sites) if site.outside
        ),
        "Cast there and back, though no list asks for both": _trips(log, listed=False),
        "Updates of weights that round-to-nearest would lose": map(_lost_updates, log.updates),
        "Ops that no wrapper reaches": log.escaped,
        "In your fp8 list, and computed in BF16": (
            f"{site.place}: {why} ({times(calls)})" for site in alike(log.sites) for why, calls in site.in_low.items()
        ),
        "Casts to FP8": _fp8_casts(log),
        "Names in your lists that no call matched": log.unmatched,
        _AS_ASKED: _trips(log, listed=True),
    }.items():
        if found := list(lines):
            yield heading, found


def _nonfinite(log: LogValues) -> Iterator[str]:
    first = log.first_nonfinite
    if first is not None:
        others = sum(site.nonfinite is not None for site in log.sites) - 1
        after = f"; later in {number(others, 'more site')}" if others else ""
        yield f"{first.place}, in call {first.nonfinite}{after}"


def _lost_updates(updates: dict[str, Any]) -> str:
    """Return the counts of `Attachment.updates()` in words."""
    rows, answer = updates["rows"], "needs no stochastic rounding"
    worst = max(rows, key=lambda row: row["lost"], default=None)
    if worst is not None and updates["needed"]:
        answer = f"most of {worst['name']!r}, {100 * worst['lost']:.0f} %"
    head = f"{updates['optimizer']}, weights={updates['weights']!r}, {number(updates['steps'], 'step')}"
    return f"{head}: {100 * updates['lost']:.0f} % of all; {answer}"


def _trips(log: LogValues, listed: bool) -> list[str]:
    """Return round trips in words, those of equal blocks (the same lines in several modules) as one."""
    found: dict[tuple, RoundTrip] = {}
    for trip in log.round_trips:
        if trip.listed is listed:
            key = trip.first, trip.then, trip.ops, trip.dtypes
            known = found.setdefault(key, RoundTrip(*key, listed=listed))
            known.calls += trip.calls
            known.bytes += trip.bytes
    return [str(trip) for trip in sorted(found.values(), key=lambda trip: trip.bytes, reverse=True)]


def _fp8_casts(log: LogValues) -> Iterable[str]:
    """Return how large the numbers of each site are, and how many the format does not hold; the worst first."""

    def lost(site: Site) -> float:
        return max((each["underflowed"] + each["saturated"]) / each["elements"] for each in site.fp8.values())

    def of_role(role: str, figures: Mapping[str, float]) -> str:
        shares = {how: figures[how] / figures["elements"] for how in ("underflowed", "saturated")}
        for how, words in {"underflowed": "of blocks as a whole", "saturated": "of blocks somewhere"}.items():
            shares[words] = figures.get(f"blocks_{how}", 0) / figures.get("blocks", 1)
        said = [f"{100 * share:.2g} % {how}" for how, share in shares.items() if share]
        return ", ".join([f"{role} up to {figures['largest']:.2g}", *said])

    for site in sorted((site for site in alike(log.sites) if site.fp8), key=lost, reverse=True):
        yield f"{site.place}: {'; '.join(of_role(*each) for each in site.fp8.items())}"
