"""Two records of one program side by side: under two lists, say, or two versions of torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

from hmpx.insight.module_names import numberless
from hmpx.insight.recording.recorded import WHERE, Site, alike
from hmpx.insight.report import Field, Grid, Report, plain
from hmpx.insight.text_table import number, short_dtypes


class Pair(NamedTuple):
    """One site in both records."""

    before: Site
    after: Site


@dataclass
class LogDiff(Report):
    """The sites that differ between two records; prints as tables, and is true if there are any.

    Attributes:
        new, gone: sites that only the second, or only the first, record has. changed: pairs of sites with another rule
            or other dtypes. same: how many sites have the same rule and dtypes in both.
    """

    new: list[Site] = field(default_factory=list)
    gone: list[Site] = field(default_factory=list)
    changed: list[Pair] = field(default_factory=list)
    same: int = 0

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.changed)

    def as_json(self) -> dict[str, Any]:
        """Return the attributes as objects."""
        return plain(asdict(self))

    def _title(self) -> tuple[str, str]:
        return "diff", "Two records"

    def _lines(self) -> Iterator[str]:
        yield f"{number(self.same, 'site')} with the same rule and dtypes"

    def _sections(self) -> Iterator[Grid]:
        befores, afters = ([pair[i] for pair in self.changed] for i in (0, 1))
        yield _grid("other rules or dtypes", afters, {"before": befores, "after": afters})
        yield _grid("new", self.new, {"rule and dtypes": self.new})
        yield _grid("gone", self.gone, {"rule and dtypes": self.gone})


def difference(before: Sequence[Site], after: Sequence[Site]) -> LogDiff:
    """Match the sites of two records, and return those that differ.

    Sites are the same if op, module and line are. The others are matched by op, module and file, in the same order, so
    that a line may have moved.
    """
    found, old, new = LogDiff(), list(before), list(after)
    for exact, by_line in ((True, True), (False, True), (True, False), (False, False)):
        waiting: dict[tuple, list[Site]] = defaultdict(list)
        for site in old:
            waiting[_key(site, exact, by_line)].append(site)
        left = []
        for site in new:
            if same := waiting[_key(site, exact, by_line)]:
                pair = Pair(same.pop(0), site)
                if exact:
                    found.same += 1
                else:
                    found.changed.append(pair)
            else:
                left.append(site)
        kept = {id(site) for sites in waiting.values() for site in sites}
        old, new = [site for site in old if id(site) in kept], left
    found.gone, found.new = old, new
    return found


def _key(site: Site, exact: bool, by_line: bool) -> tuple:
    """Return what makes two sites the same: op, module, the line or its file, and rule and dtypes if they must fit."""
    where = site.where if by_line else os.path.basename(site.where.rpartition(":")[0])
    return (site.op, site.module, where, *((site.rule, site.given, site.seen, site.result) if exact else ()))


def _grid(title: str, sites: Sequence[Site], ruled: dict[str, list[Site]]) -> Grid:
    """Return a table of sites, with a column of rules and dtypes for each list in `ruled`. Equal blocks share a row."""
    rows: dict[tuple, list[Site]] = defaultdict(list)
    for site, *each in zip(sites, *ruled.values(), strict=True):
        said = [": ".join(filter(None, (one.rule, short_dtypes(one.dtypes)))) for one in each]
        key = (site.op, site.where, numberless(site.module), *said)
        rows[key].append(site)
    shown = [(alike(group)[0], *key[3:]) for key, group in rows.items()]
    fields = [replace(each, text=_of_first(each.text)) for each in WHERE]
    fields += [Field(head, itemgetter(i), least=16) for i, head in enumerate(ruled, 1)]
    head = f"{title}: {number(len(sites), 'site')}"
    return Grid(fields, shown, head, page=head)


def _of_first(text: Callable[[Site], str]) -> Callable[[tuple], str]:
    return lambda row: text(row[0])
