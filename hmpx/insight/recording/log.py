"""`Log`: what was recorded, as a table of the dearest sites with what calls for attention, as a page, and as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hmpx.errors import HmpxError
from hmpx.insight.pages import Report, bars, box, closed, grid, page
from hmpx.insight.reasons import in_a_line
from hmpx.insight.recording.diff import LogDiff, difference
from hmpx.insight.recording.recorded import SUMS, RoundTrip, Site, alike, fp8_in_words, place_columns, trips_in_words
from hmpx.insight.text_table import (
    Column,
    milliseconds,
    number,
    short_dtypes,
    short_place,
    short_places,
    size,
    table,
    terminal_width,
    times,
)

SCHEMA = 1  # of the JSON
_ROWS = 20  # of the table
_LINES = 8  # of each kind beneath it
_WIDTH = 110  # of the text in the page for readers without scripts
_AS_ASKED = "Cast there and back, as the lists ask"
NOTHING_CONVERTED = (
    "Nothing was converted while this recorded, so that torch's ops ran as they are, and were not seen.\n"
    "Put a conversion in force, before or inside: `with hmpx.convert(), hmpx.record() as log:`, or a recipe by\n"
    "`hmpx.prepare` or `python -m hmpx record --recipe NAME script.py`."
)
_GONE = {
    "every": "read log.sites in your loop where log.steps is a multiple; examples/watch_precision.py does so",
    "updates": "`python -m hmpx doctor train.py` finds the updates that are lost",
}


@dataclass
class Log(Report):
    """What `record` saw. It prints as a table, the dearest sites first, with what calls for attention beneath it.

    Attributes:
        sites: a `Site` for each op, line, module and set of dtypes. round_trips: tensors that were cast there and back.
        unmatched: names in op lists of yours that no call matched. unmatched_of_hmpx: the same of the lists that come
            with hmpx, which serve many models. escaped: listed ops that ran in another dtype than their list says,
            since no patch in Python reaches them, one sentence each. steps: of optimizers, meanwhile.
        unchosen: the sites that ran in a dtype nobody chose. first_nonfinite: the site of the first call of all with a
            result that was not finite; None if there is none. totals: sums over the sites, and the casts' share of
            the time.
        policy: the op lists, as a list file; "" where nothing was converted. about: versions of hmpx, torch and Python;
            what this CPU has.

    `html(path)` writes a page. `json(path)` saves it, and `load(path)` reads that; `as_json()` is the same as objects,
    with the names of the attributes. "schema" in it is 1; it grows when a name changes its meaning or goes away.
    `diff(other)` compares it with another. It may be read while it records.

    Example:
        >>> with hmpx.convert(), hmpx.record() as log:
        ...     y = inputs.matmul(inputs.t())
        >>> site = log.sites[0]
        >>> site.op, site.rule, site.dtypes, site.shapes, site.casts
        ('matmul', 'bf16', 'float32 -> bfloat16', ['2x4, 4x2'], 2)
    """

    sites: list[Site] = field(default_factory=list)
    round_trips: list[RoundTrip] = field(default_factory=list)
    unmatched: tuple[str, ...] = ()
    unmatched_of_hmpx: tuple[str, ...] = ()
    escaped: tuple[str, ...] = ()
    steps: int = 0
    policy: str = ""
    about: dict[str, str] = field(default_factory=dict)

    @property
    def unchosen(self) -> list[Site]:
        """Return the sites that ran in a dtype nobody chose; `Site.unchosen` says why."""
        return [site for site in self.sites if site.unchosen]

    @property
    def first_nonfinite(self) -> Site | None:
        """Return the site of the first call of all whose result was not finite."""
        wrong = (site for site in self.sites if site.nonfinite_at)
        return min(wrong, key=lambda site: site.nonfinite_at or 0, default=None)

    @property
    def totals(self) -> dict[str, Any]:
        """Return the sums over the sites, by the names of their attributes, and `cast_share`."""
        sums = {name: sum(getattr(site, name) for site in self.sites) for name in SUMS}
        seconds = sums["cast_seconds"] + sums["op_seconds"]
        return {**sums, "cast_share": sums["cast_seconds"] / seconds if seconds else 0.0}

    def as_json(self) -> dict[str, Any]:
        """Return everything as numbers, strings, lists and dicts, by the names of the attributes; see `json`."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("sites", "round_trips"):
            values[name] = [asdict(each) for each in values[name]]
        return {"schema": SCHEMA, **values, "totals": self.totals}

    def __str__(self) -> str:
        return _as_text(self, terminal_width())

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"Log.{name} is gone: {_GONE[name]}" if name in _GONE else f"Log has no {name!r}")

    def _page(self) -> str:
        return _as_page(self)

    def diff(self, other: Log) -> LogDiff:
        """Compare with another record of the same program, made under other lists or another torch.

        Returns:
            The sites that are `new` there, those that are `gone`, and those that `changed` their rule or dtypes, each
            with `before` and `after`. It prints as tables, and is true if there is a difference. A line that moved is
            found again by its module and op.

        Example:
            >>> def recorded(level):
            ...     with hmpx.convert(level), hmpx.record() as log:
            ...         y = inputs.exp()
            ...     return log
            >>> [(pair.before.rule, pair.after.rule) for pair in recorded("O1").diff(recorded("O2")).changed]
            [('promote', 'fp32')]
        """
        return difference(self.sites, other.sites)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Log:
        """Read what `json` has saved, here or elsewhere. Characters that a terminal would obey are left out.

        Raises:
            HmpxError: it cannot be read, is no JSON, or no record of which this version can show everything.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HmpxError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise HmpxError(f"{path}: no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise HmpxError(f"{path}: no record of schema {SCHEMA}, as hmpx.record and `python -m hmpx record` save it")
        try:
            values = _values(cls, _printable(found))
            values["sites"] = [Site(**_values(Site, row)) for row in values["sites"]]
            values["round_trips"] = [RoundTrip(**_values(RoundTrip, row)) for row in values["round_trips"]]
            values["policy"] = "\n".join(map(_printable, found["policy"].split("\n")))
            log = cls(**values)
            _as_page(log)  # which needs values of the right types
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise HmpxError(f"{path}: a record that is not whole: {in_a_line(error)}") from None
        return log


def _values(cls: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the values in an object of JSON that a class has, lists as its tuples. Later versions may add others."""
    types = {each.name: each.type for each in fields(cls) if each.name in row}  # as they are written
    return {name: tuple(row[name]) if kind.startswith("tuple") else row[name] for name, kind in types.items()}


def _printable(value: Any) -> Any:
    """Return a value of JSON without the characters that a terminal would obey."""
    if isinstance(value, str):
        return "".join(filter(str.isprintable, value))
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, dict):
        return {_printable(key): _printable(each) for key, each in value.items()}
    return value


def _as_text(log: Log, width: int) -> str:
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


def _as_page(log: Log) -> str:
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
    return page("record", "What ran in which precision", lines, sections, _as_text(log, _WIDTH))


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


def _totals(log: Log) -> Iterator[str]:
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


def _beneath(log: Log) -> Iterator[str]:
    """Yield the lines that call for attention, each kind under its heading."""
    for heading, lines in attention(log):
        yield from ("", heading, *(f"  {short_places(line)}" for line in lines[:_LINES]))
        if lines[_LINES:]:
            yield f"  … and {len(lines) - _LINES} more"
    if log.unmatched_of_hmpx:
        names = number(len(log.unmatched_of_hmpx), "name")
        yield from ("", f"{names} of the lists that come with hmpx matched no call: they serve many models")


def attention(log: Log) -> Iterator[tuple[str, list[str]]]:
    """Yield headings with their lines, the worst first."""
    for heading, lines in {
        "First result with an inf or a NaN": _nonfinite(log),
        "In a dtype that nobody chose": (
            f"{site.place}: {site.unchosen} ({times(site.calls)})" for site in alike(log.unchosen)
        ),
        "Whole numbers, as positions are, that low precision does not have: keep them in FP32": (
            f"{site.place}: {site.positions} ({site.rule} list)" for site in alike(log.sites) if site.positions
        ),
        "Cast outside of any model: put `with hmpx.disable_casts():` around it, or say where: model": (
            f"{site.place} ({times(site.outside)})" for site in alike(log.sites) if site.outside
        ),
        "Cast there and back, though no list asks for both": trips_in_words(log.round_trips, listed=False),
        "Ops that no wrapper reaches": log.escaped,
        "In your fp8 list, and computed in BF16": (
            f"{site.place}: {why} ({times(calls)})" for site in alike(log.sites) for why, calls in site.in_low.items()
        ),
        "Casts to FP8": fp8_in_words(log.sites),
        "Names in your lists that no call matched": log.unmatched,
        _AS_ASKED: trips_in_words(log.round_trips, listed=True),
    }.items():
        if found := list(lines):
            yield heading, found


def _nonfinite(log: Log) -> Iterator[str]:
    first = log.first_nonfinite
    if first is not None:
        others = sum(site.nonfinite is not None for site in log.sites) - 1
        after = f"; later in {number(others, 'more site')}" if others else ""
        yield f"{first.place}, in call {first.nonfinite}{after}"
