"""Two records of one program side by side: under two lists, say, or two versions of torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hmpx.insight.module_names import numberless
from hmpx.insight.recording.recorded import Recorded, Site, alike
from hmpx.insight.recording.table import place_columns
from hmpx.insight.text_table import Column, milliseconds, number, short_dtypes, size, table, terminal_width

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
        first, second = ((site.rule, site.given, site.seen, site.result) for site in (self.before, self.after))
        return first != second

    @property
    def seconds(self) -> float:
        return self.after.seconds / self.after.calls - self.before.seconds / self.before.calls

    @property
    def casts(self) -> float:
        return self.after.casts / self.after.calls - self.before.casts / self.before.calls


@dataclass
class LogDiff:
    """The differences of `after` from `before`; prints as tables.

    Attributes:
        new, gone: sites that only `after`, or only `before`, has. pairs: the sites that both have. changed: those of
            them with another rule, or other dtypes.

    Sites are the same if op, module and line are. The others are matched by op, module and file, in the same order, so
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
    """Pair the sites of equal keys, in their order; return the rest of both."""
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
    yield from _titled("other rules or dtypes", len(diff.changed), [pair.after for pair in changed], width, changed)
    yield from _titled("new", len(diff.new), alike(diff.new), width)
    yield from _titled("gone", len(diff.gone), alike(diff.gone), width)
    dearer = [pair for pair in _alike(diff.pairs) if pair.seconds or pair.casts]
    dearer.sort(key=lambda pair: abs(pair.seconds * pair.after.calls), reverse=True)
    if dearer:
        yield from ("", "what a call takes, the largest changes of all calls together first")
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


def _alike(pairs: Iterable[Pair]) -> list[Pair]:
    """Merge pairs of equal blocks, with the same rules and dtypes in both records."""
    groups: dict[tuple, list[Pair]] = defaultdict(list)
    for pair in pairs:
        both = [
            (site.op, site.where, numberless(site.module), site.rule, site.dtypes) for site in (pair.before, pair.after)
        ]
        groups[tuple(both)].append(pair)
    return [Pair(alike(p.before for p in group)[0], alike(p.after for p in group)[0]) for group in groups.values()]


def _titled(title: str, count: int, sites: list[Site], width: int, changed: Sequence[Pair] = ()) -> Iterator[str]:
    """Yield a heading and a table of sites; of `changed` ones their rules and dtypes in both records."""
    if not sites:
        return
    yield from ("", f"{title}: {number(count, 'site')}")
    shown = sites[:_ROWS]
    if changed:
        columns = [
            Column(head, [_rule(site) for site in both[:_ROWS]], least=16)
            for head, both in (("before", [pair.before for pair in changed]), ("after", sites))
        ]
    else:
        columns = [
            Column("rule and dtypes", [_rule(site) for site in shown], least=16),
            Column("calls", [str(site.calls) for site in shown], right=True),
            Column("casts", [str(site.casts) for site in shown], right=True),
            Column("casts ms", [milliseconds(site.cast_seconds) for site in shown], right=True),
            Column("op ms", [milliseconds(site.op_seconds) for site in shown], right=True),
        ]
    yield from (f"  {line}" for line in table([*place_columns(shown), *columns], width - 2))
    if sites[_ROWS:]:
        yield f"  … and {len(sites) - _ROWS} more rows"


def _rule(site: Site) -> str:
    return f"{site.rule or '-'}: {short_dtypes(site.dtypes)}"


def _prices(pairs: Sequence[Pair], width: int) -> list[str]:
    before, after = [pair.before for pair in pairs], [pair.after for pair in pairs]
    columns = [
        Column(title, [f"{site.casts / site.calls:.3g}" for site in sites], right=True, rank=2)
        for title, sites in (("casts", before), ("then", after))
    ]
    columns += [
        Column(title, [f"{1e6 * site.seconds / site.calls:.0f}" for site in sites], right=True)
        for title, sites in (("us", before), ("then", after))
    ]
    columns.append(Column("change", [f"{1e6 * pair.seconds:+.0f}" for pair in pairs], right=True))
    return table([*place_columns(after), *columns], width)
