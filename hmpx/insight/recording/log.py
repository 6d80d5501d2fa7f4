"""`Log`: what was recorded, as a table of the dearest sites with what calls for attention, as a page, and as JSON."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hmpx.errors import HmpxError
from hmpx.insight.finding import in_a_line, short_place, short_places
from hmpx.insight.recording.recorded import (
    SUMS,
    WHERE,
    LogDiff,
    RoundTrip,
    Site,
    alike,
    difference,
    fp8_in_words,
    trips_in_words,
)
from hmpx.insight.report import Bars, Field, Grid, Lines, Report, milliseconds, number, short_dtypes, size, times

_BARS = 20  # of the picture in the page
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
        policy: the op lists, as a list file; "" where nothing was converted. about: the script, the recipe, the date,
            the versions of hmpx, torch and Python, and the device.

    `html(path)` writes a page. `json(path)` saves it, and `load(path)` reads that; `as_json()` is the same as objects,
    with the names of the attributes. "schema" in it is 1; it grows when a name changes its meaning or goes away.
    `diff(other)` compares it with another. It may be read while it records.
    """

    _schema = 1
    _title = "record", "What ran in which precision"
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
        """Return the attributes as objects of JSON, by their names, and `totals`."""
        return {**super().as_json(), "totals": self.totals}

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"Log.{name} is gone: {_GONE[name]}" if name in _GONE else f"Log has no {name!r}")

    def _lines(self) -> list[str]:
        if not self.policy:
            return [NOTHING_CONVERTED]
        return [*_totals(self)] if self.sites else ["No op was called while this recorded."]

    def _sections(self) -> Iterator[Grid | Lines | Bars]:
        if self.policy:
            rows = sorted(alike(self.sites), key=lambda site: site.seconds, reverse=True)
            yield Bars("Where the time of casts goes", "Equal blocks stand together.", _costs(rows), unit="ms")
            found = [Lines(head, [*map(short_places, each)], head != _AS_ASKED) for head, each in attention(self)]
            yield from (each for each in found if each.wrong)
            yield Grid(_FIELDS, self.sites, "", rows, _rest, _notes, page="Every site", order="op ms")
            yield from (each for each in found if not each.wrong)
            if names := self.unmatched_of_hmpx:
                many = f"{number(len(names), 'name')} of the lists that come with hmpx matched no call"
                yield Lines(f"{many}: they serve many models", [", ".join(names)], closed=True)
            yield Lines("The lists in force, as one file that hmpx reads", self.policy.splitlines(), closed=True)

    def _about(self) -> dict[str, str]:
        return self.about

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
        """Read what `json` has saved, here or elsewhere.

        Raises:
            HmpxError: it cannot be read, is no JSON, or no record of which this version can show everything.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise HmpxError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise HmpxError(f"{path}: no JSON: {error}") from None
        if not isinstance(found, dict) or found.get("schema") != cls._schema:
            raise HmpxError(
                f"{path}: no record of schema {cls._schema}, as hmpx.record and `python -m hmpx record` save it"
            )
        try:
            values = _values(cls, found)
            values["sites"] = [Site(**_values(Site, row)) for row in values["sites"]]
            values["round_trips"] = [RoundTrip(**_values(RoundTrip, row)) for row in values["round_trips"]]
            log = cls(**values)
            str(log), log._page(), log.policy.splitlines()  # which need values of the right types
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise HmpxError(f"{path}: a record that is not whole: {in_a_line(error)}") from None
        return log


def _values(cls: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the values in an object of JSON that a class has, lists as its tuples. Later versions may add others."""
    types = {each.name: each.type for each in fields(cls) if each.name in row}  # as they are written
    return {name: tuple(row[name]) if kind.startswith("tuple") else row[name] for name, kind in types.items()}


def _time(title: str, seconds: Callable[[Site], float]) -> Field:
    def text(site: Site) -> str:
        return milliseconds(seconds(site))

    return Field(title, text, "number", lambda site: 1e3 * seconds(site), right=True)


def _megabytes(site: Site) -> str:
    return f"{site.bytes_cast / 1e6:.3g}"


_FIELDS = (
    *WHERE,
    Field("rule", lambda site: site.rule or "-", rank=1),
    Field("in -> out", lambda site: short_dtypes(site.dtypes), "dtypes", least=17),
    Field("calls", lambda site: str(site.calls), "number", lambda site: site.calls, right=True, rank=4),
    Field("tensors cast", lambda site: str(site.casts), "number", lambda site: site.casts, right=True, rank=3),
    Field("avoided", kind="number", value=lambda site: site.casts_avoided, page=True),
    Field("cast MB", _megabytes, "number", lambda site: site.bytes_cast / 1e6, right=True, rank=5),
    _time("cast ms", lambda site: site.cast_seconds),
    _time("op ms", lambda site: site.op_seconds),
    Field("inf, NaN", lambda site: f"call {site.nonfinite}" if site.nonfinite else "", page=True),
)


def _rest(sites: Sequence[Site]) -> str:
    return f"{len(sites)} more, {milliseconds(sum(site.seconds for site in sites))} ms together"


def _notes(site: Site) -> Iterator[str]:
    yield from (site.where, f"called as {site.entry}", site.reason, f"shapes {'; '.join(site.shapes)}", site.unchosen)


def _costs(sites: Sequence[Site]) -> list[tuple[str, float, str]]:
    dearest = sorted((site for site in sites if site.cast_seconds), key=lambda site: -site.cast_seconds)
    names: list[
        tuple[str, ...]
    ] = [  # by op and module; with the line, and then the dtypes, where that is the name of two
        (f"{site.op} {site.module or short_place(site.where)}", short_place(site.where), short_dtypes(site.dtypes))
        for site in dearest
    ]
    for i in (1, 2):
        count = Counter(name for name, *_ in names)
        names = [(f"{each[0]}, {each[i]}", *each[1:]) if count[each[0]] > 1 else each for each in names]
    return [
        (name, 1e3 * site.cast_seconds, milliseconds(site.cast_seconds))
        for (name, *_), site in zip(names[:_BARS], dearest, strict=False)
    ]


def _totals(log: Log) -> Iterator[str]:
    sums = log.totals
    ops = len({site.op for site in log.sites})
    steps = f" in {number(log.steps, 'step')}" if log.steps else ""
    yield f"{number(sums['calls'], 'call')} of {number(ops, 'op')} at {number(len(log.sites), 'site')}{steps}"
    yield (
        f"{number(sums['casts'], 'cast')}, {sums['casts_avoided']} avoided: {size(sums['bytes_cast'])} in "
        f"{milliseconds(sums['cast_seconds'])} ms, {100 * sums['cast_share']:.0f} % of the time of casts and ops"
    )


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
        yield "what made it, and what mends it: python -m hmpx doctor, in the place of record"
