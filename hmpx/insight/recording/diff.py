"""Two records of one program side by side: under two lists, say, or two versions of torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hmpx.insight.recording.alike import alike, numberless
from hmpx.insight.recording.recorded import Recorded
from hmpx.insight.recording.site import Site
from hmpx.insight.recording.words import milliseconds, number, short_dtypes, size
from hmpx.insight.text_table import Column, table, terminal_width

_ROWS = 12  # of each table


@dataclass(frozen=True)
class Pair:
    """One site in both records.

    differs: whether another rule acts, or the dtypes are others. seconds, casts: by how much a call takes longer in the
    second record, and casts more tensors, in the mean.
    """

    before: Site
    after: Site

    @property
    def differs(self) -> bool:
        first, second = self.before, self.after
        return (first.rule, first.given, first.seen, first.result) != (
            second.rule,
            second.given,
            second.seen,
            second.result,
        )

    @property
    def seconds(self) -> float:
        return self.after.seconds / self.after.calls - self.before.seconds / self.before.calls

    @property
    def casts(self) -> float:
        return self.after.casts / self.after.calls - self.before.casts / self.before.calls


@dataclass
class LogDiff:
    """What is different in `after`; prints as tables.

    Attributes:
        new, gone: sites that only `after`, or only `before`, has. pairs: the sites that both have. changed: those of
            them with another rule, or other dtypes.

    Sites are the same if op, module and line are; of the others, those of one op, module and file in the same order, so
    that a line may have moved.
    """

    before: Recorded
    after: Recorded
    new: list[Site] = field(default_factory=list)
    gone: list[Site] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    @property
    def changed(self) -> list[Pair]:
        return [pair for pair in self.pairs if pair.differs]

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.changed)

    def __str__(self) -> str:
        return "\n".join(_lines(self, terminal_width()))


def difference(before: Recorded, after: Recorded) -> LogDiff:
    """Match the sites of two records."""
    found = LogDiff(before, after)
    old, new = list(before.sites), list(after.sites)
    for key in (
        lambda site: (site.op, site.module, site.where, site.rule, site.dtypes),
        lambda site: (site.op, site.module, site.where),
        lambda site: (site.op, site.module, _file(site), site.rule, site.dtypes),
        lambda site: (site.op, site.module, _file(site)),
    ):
        old, new = _match(old, new, key, found.pairs)
    found.gone, found.new = old, new
    return found


def _file(site: Site) -> str:
    return os.path.basename(site.where.rpartition(":")[0])


def _match(
    old: list[Site], new: list[Site], key: Callable[[Site], tuple], pairs: list[Pair]
) -> tuple[list[Site], list[Site]]:
    """Pair the sites of equal keys, in their order; what is left of both."""
    waiting: dict[tuple, list[Site]] = defaultdict(list)
    for site in old:
        waiting[key(site)].append(site)
    left = []
    for site in new:
        if waiting[key(site)]:
            pairs.append(Pair(waiting[key(site)].pop(0), site))
        else:
            left.append(site)
    kept = {id(site) for sites in waiting.values() for site in sites}
    return [site for site in old if id(site) in kept], left


def _lines(diff: LogDiff, width: int) -> Iterator[str]:
    for name, value in diff.after.about.items():
        if value != diff.before.about.get(name):
            yield f"{name}: {diff.before.about.get(name, 'unknown')} -> {value}"
    yield from _totals(diff)
    changed = _alike(diff.changed)
    yield from _titled("other rules or dtypes", len(diff.changed), changed, width, _what_changed)
    yield from _titled("new", len(diff.new), alike(diff.new), width, _sites)
    yield from _titled("gone", len(diff.gone), alike(diff.gone), width, _sites)
    dearer = [pair for pair in _alike(diff.pairs) if pair.seconds or pair.casts]
    dearer.sort(key=lambda pair: abs(pair.seconds * pair.after.calls), reverse=True)
    if dearer:
        yield ""
        yield "what a call takes, the largest changes of all calls together first"
        yield from _prices(dearer[:_ROWS], width)


def _totals(diff: LogDiff) -> Iterator[str]:
    first, second = diff.before.totals, diff.after.totals
    steps = f"steps {diff.before.steps} -> {diff.after.steps}, " if diff.after.steps or diff.before.steps else ""
    yield (
        f"{steps}calls {first['calls']} -> {second['calls']}, casts {first['casts']} -> {second['casts']}, "
        f"moved {size(first['bytes_cast'])} -> {size(second['bytes_cast'])}, "
        f"casts' share of the time {100 * first['cast_share']:.0f} -> {100 * second['cast_share']:.0f} %"
    )
    if not diff:
        yield f"the same {number(len(diff.pairs), 'site')}, with the same rules and dtypes"


def _titled(
    title: str, count: int, rows: Sequence[Any], width: int, draw: Callable[[Sequence[Any], int], list[str]]
) -> Iterator[str]:
    if rows:
        yield ""
        yield f"{title}: {number(count, 'site')}"
        yield from (f"  {line}" for line in draw(rows[:_ROWS], width - 2))
        if rows[_ROWS:]:
            yield f"  … and {len(rows) - _ROWS} more rows"


def _alike(pairs: Iterable[Pair]) -> list[Pair]:
    """Pairs of equal blocks, with what is the same in both, as one."""
    groups: dict[tuple, list[Pair]] = defaultdict(list)
    for pair in pairs:
        both = [
            (site.op, site.where, numberless(site.module), site.rule, site.dtypes) for site in (pair.before, pair.after)
        ]
        groups[tuple(both)].append(pair)
    together = ((alike([p.before for p in group]), alike([p.after for p in group])) for group in groups.values())
    return [Pair(before[0], after[0]) for before, after in together]


def _place(sites: Sequence[Site]) -> list[Column]:
    return [
        Column("op", [site.op for site in sites], least=14),
        Column("line", [os.path.basename(site.where) for site in sites], least=14, from_left=True),
        Column("module", [site.module for site in sites], least=12, from_left=True, rank=1),
    ]


def _said(site: Site) -> str:
    return f"{site.rule or '-'}: {short_dtypes(site.dtypes)}"


def _what_changed(pairs: Sequence[Pair], width: int) -> list[str]:
    before, after = (
        [_said(site) for site in sites] for sites in zip(*((p.before, p.after) for p in pairs), strict=True)
    )
    columns = [Column("before", before, least=16), Column("after", after, least=16)]
    return table([*_place([pair.after for pair in pairs]), *columns], width)


def _sites(sites: Sequence[Site], width: int) -> list[str]:
    columns = [
        Column("rule and dtypes", [_said(site) for site in sites], least=16),
        Column("calls", [str(site.calls) for site in sites], right=True),
        Column("casts", [str(site.casts) for site in sites], right=True),
        Column("casts ms", [milliseconds(site.cast_seconds) for site in sites], right=True),
        Column("op ms", [milliseconds(site.op_seconds) for site in sites], right=True),
    ]
    return table([*_place(sites), *columns], width)


def _prices(pairs: Sequence[Pair], width: int) -> list[str]:
    def each(text: Callable[[Site], str], after: bool) -> list[str]:
        return [text(pair.after if after else pair.before) for pair in pairs]

    def micro(site: Site) -> str:
        return f"{1e6 * site.seconds / site.calls:.0f}"

    def casts(site: Site) -> str:
        return f"{site.casts / site.calls:.3g}"

    columns = [
        Column("casts", each(casts, False), right=True, rank=2),
        Column("then", each(casts, True), right=True, rank=2),
        Column("us", each(micro, False), right=True),
        Column("then", each(micro, True), right=True),
        Column("change", [f"{1e6 * pair.seconds:+.0f}" for pair in pairs], right=True),
    ]
    return table([*_place([pair.after for pair in pairs]), *columns], width)
