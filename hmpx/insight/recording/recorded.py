"""What a record holds: call sites with the figures of casts to FP8, round trips; and how two records differ."""

from __future__ import annotations

import contextlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch

from hmpx.base.process_state import fp8_watchers
from hmpx.insight.finding import at_place, numberless
from hmpx.insight.report import (
    Field,
    Grid,
    Report,
    about_files,
    dtype_steps,
    grouped,
    number,
    short_dtypes,
    size,
    times,
)
from hmpx.ops.policies.fp8_format import spills_of

Tensor = torch.Tensor
aten = torch.ops.aten
T = TypeVar("T")
SHAPES = 8  # how many different ones are kept of one site
SUMS = ("calls", "casts", "casts_avoided", "bytes_cast", "cast_seconds", "op_seconds", "outside")


@dataclass
class Site:
    """The calls of one op from one line, in one module, that came in the same dtypes.

    Attributes:
        op: its name in op lists; "to" is a cast by hand. entry: the name it was called by.
        where: the line of the caller's code, as file:line. module: the dotted name of the module that called it, as in
            `named_modules()`; "" where it was called in none.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        given, seen, result: the floating dtypes that came in, those that the op ran on, and those that came out.
        calls: how many. shapes: of the tensors that came in, at most 8 different ones, as "32x64, 64".
        casts: tensors that were cast, by a rule or by hand. casts_avoided: tensors that a rule looked at and found
            right. bytes_cast: the bytes that the casts read and wrote. cast_seconds, op_seconds: the time of the casts,
            and of the op itself.
        outside: calls that were cast because every call is (``where="everywhere"``), though they are no model's.
        nonfinite: the first call, from 1, whose result had an inf or a NaN that is not the -inf of a mask; None if none
            had. nonfinite_at: that call's number among those of all sites.
        fp8: of a site in FP8, for "inputs", "weights" and "gradients" the "largest" magnitude, and of how many
            "elements" how many "underflowed" to zero or "saturated"; of how many "blocks", which share a scale, how
            many became zero as a whole ("blocks_underflowed") and how many hold a number that saturated
            ("blocks_saturated"). Complete when the region ends.
        in_low: why calls that are listed for FP8 were computed in BF16, and how many.
        unchosen: in words, why it ran in a dtype that nobody chose; "" where it did not.
        positions: in words, which whole numbers a cast of a rule's rounded to others; "" where it rounded none.
    """

    op: str
    entry: str
    where: str
    module: str = ""
    rule: str = ""
    reason: str = ""
    given: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    calls: int = 0
    shapes: list[str] = field(default_factory=list)
    casts: int = 0
    casts_avoided: int = 0
    bytes_cast: int = 0
    cast_seconds: float = 0.0
    op_seconds: float = 0.0
    outside: int = 0
    nonfinite: int | None = None
    nonfinite_at: int | None = None
    unchosen: str = ""
    positions: str = ""
    fp8: dict[str, dict[str, float]] = field(default_factory=dict)
    in_low: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Return the time of the casts and of the op."""
        return self.cast_seconds + self.op_seconds

    @property
    def dtypes(self) -> str:
        """Return the dtypes of arguments, of the op and of its result, each once: "float32 -> bfloat16"."""
        return dtype_steps(self.given, self.seen, self.result)

    @property
    def place(self) -> str:
        """Return its line, op and module, as one text."""
        return at_place(self.where, self.op, self.module)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


# The figures of casts to FP8: how large the numbers are, and how many of them the format does not hold

_FIGURES = (
    *("largest", "elements", "underflowed", "saturated"),
    *("blocks", "blocks_underflowed", "blocks_saturated"),
)


class Fp8Casts:
    """The casts to FP8 of one call, which go on in its backward pass, or of a site."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}  # on the device, until the end
        self.in_low: Counter[str] = Counter()
        self._rest: Fp8Casts | None = None  # of the site, once it is known

    def note(self, why_not: str) -> None:
        """Note that a call that is listed for FP8 is computed in FP8, or in low precision for this reason."""
        if why_not:
            self.in_low[why_not] += 1

    def seen(
        self, role: str, x: Tensor, codes: Tensor, scale: Tensor, name: str, largest: Callable[[Tensor], Tensor]
    ) -> None:
        """Note an operand, the codes that it was cast to, and the scale that decodes them.

        largest: finds the largest number among those that share a scale.
        """
        if not role:
            return
        magnitude = aten.abs(aten.to.dtype(x.detach(), torch.float32))
        magnitude = aten.where(aten.isfinite(magnitude), magnitude, 0.0)
        made = aten.abs(aten.to.dtype(codes, torch.float32))
        zero = aten.bitwise_and(aten.eq(made, 0), aten.gt(magnitude, 0))
        beyond = aten.gt(aten.div(magnitude, scale), spills_of(name))
        lost = aten.bitwise_and(aten.eq(largest(made), 0), aten.gt(largest(magnitude), 0))
        clipped = aten.gt(largest(aten.to.dtype(beyond, torch.float32)), 0)
        every = aten.ones_like(zero), zero, beyond, aten.ones_like(lost), lost, clipped
        counts = [aten.to.dtype(aten.sum(each), torch.float64) for each in every]
        found = aten.stack([aten.to.dtype(aten.amax(magnitude), torch.float64), *counts])
        (self._rest or self)._add(role, found)

    def _add(self, role: str, found: Tensor) -> None:
        before = self._totals.get(role)
        if before is not None:
            found = aten.cat([aten.maximum(found[:1], before[:1]), aten.add(found[1:], before[1:])])
        self._totals[role] = found

    def into(self, site: Site) -> None:
        """Write the figures into a site, which waits for the device."""
        site.in_low = dict(self.in_low)
        site.fp8 = {role: dict(zip(_FIGURES, each.tolist(), strict=True)) for role, each in self._totals.items()}

    def take(self, casts: Fp8Casts) -> None:
        """Take over the casts that a call has seen, and those that it will see."""
        self.in_low.update(casts.in_low)
        for role, found in casts._totals.items():
            self._add(role, found)
        casts._rest = self


@contextlib.contextmanager
def watched(casts: Fp8Casts) -> Iterator[None]:
    """Let `casts` see this thread's casts to FP8 in a region, and those of their gradients whenever they come."""
    fp8_watchers[get_ident()] = casts
    try:
        yield
    finally:
        del fp8_watchers[get_ident()]


@dataclass
class RoundTrip:
    """A tensor that one line widened and another narrowed again, or the other way round.

    Attributes:
        first, then: the lines, as file:line. ops: what was called there. dtypes: the three that it went through.
        calls: how often. bytes: what the second cast read and wrote. listed: whether op lists ask for both.
    """

    first: str
    then: str
    ops: tuple[str, str]
    dtypes: tuple[str, str, str]
    calls: int = 0
    bytes: int = 0
    listed: bool = False

    def __str__(self) -> str:
        down, up = self.ops
        return (
            f"{self.first}: {down} makes {self.dtypes[1]} of {self.dtypes[0]}, and {self.then}: {up} makes it "
            f"{self.dtypes[2]} again ({times(self.calls)}, {size(self.bytes)})"
        )


WHERE = (  # the columns that say where a site is
    Field("op", lambda site: site.op, least=14),
    Field("line", lambda site: os.path.basename(site.where), "end", least=14),
    Field("module", lambda site: site.module, "end", least=12, rank=2),
)


def alike(sites: Iterable[Site]) -> list[Site]:
    """Merge sites of equal blocks: the same line and op, in modules whose names differ in their numbers only.

    A merged site has their sums, and a module such as `blocks.*.norm`.
    """

    def key(site: Site) -> tuple:
        names = numberless(site.module), numberless(site.unchosen)
        return site.op, site.entry, site.where, site.rule, site.dtypes, *names

    groups = grouped(sites, key)
    return [_together(group) if len(group) > 1 else group[0] for group in groups.values()]


def _together(group: list[Site]) -> Site:
    first = group[0]
    same_module = len({site.module for site in group}) == 1
    return replace(
        first,
        module=first.module if same_module else numberless(first.module),
        unchosen=first.unchosen if same_module else numberless(first.unchosen),
        shapes=list(dict.fromkeys(shape for site in group for shape in site.shapes))[:SHAPES],
        nonfinite=min((site.nonfinite for site in group if site.nonfinite), default=None),
        nonfinite_at=min((site.nonfinite_at for site in group if site.nonfinite_at), default=None),
        fp8=_figures(group),
        in_low=dict(sum((Counter(site.in_low) for site in group), Counter())),
        **{name: sum(getattr(site, name) for site in group) for name in SUMS},
    )


def _figures(group: list[Site]) -> dict[str, dict[str, float]]:
    """Return the figures of casts to FP8 of several sites: the largest magnitude, and sums."""
    found: dict[str, dict[str, float]] = {}
    for role, figures in (each for site in group for each in site.fp8.items()):
        known = found.setdefault(role, dict.fromkeys(figures, 0.0))
        for name, figure in figures.items():
            known[name] = max(known[name], figure) if name == "largest" else known[name] + figure
    return found


def trips_in_words(trips: Iterable[RoundTrip], listed: bool) -> list[str]:
    """Return round trips in words, those of equal blocks (the same lines in several modules) as one."""
    found: dict[tuple, RoundTrip] = {}
    for trip in trips:
        if trip.listed is listed:
            key = trip.first, trip.then, trip.ops, trip.dtypes
            known = found.setdefault(key, RoundTrip(*key, listed=listed))
            known.calls += trip.calls
            known.bytes += trip.bytes
    return [str(trip) for trip in sorted(found.values(), key=lambda trip: trip.bytes, reverse=True)]


def fp8_in_words(sites: Iterable[Site]) -> Iterator[str]:
    """Yield how large the numbers of each site are, and how many the format does not hold; the worst first."""

    def lost(site: Site) -> float:
        return max((each["underflowed"] + each["saturated"]) / each["elements"] for each in site.fp8.values())

    def of_role(role: str, figures: Mapping[str, float]) -> str:
        shares = {how: figures[how] / figures["elements"] for how in ("underflowed", "saturated")}
        for how, words in {"underflowed": "of blocks as a whole", "saturated": "of blocks somewhere"}.items():
            shares[words] = figures.get(f"blocks_{how}", 0) / figures.get("blocks", 1)
        said = [f"{100 * share:.2g} % {how}" for how, share in shares.items() if share]
        return ", ".join([f"{role} up to {figures['largest']:.2g}", *said])

    for site in sorted((site for site in alike(sites) if site.fp8), key=lost, reverse=True):
        yield f"{site.place}: {'; '.join(of_role(*each) for each in site.fp8.items())}"


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

    _title = "diff", "Two records"
    new: list[Site] = field(default_factory=list)
    gone: list[Site] = field(default_factory=list)
    changed: list[Pair] = field(default_factory=list)
    same: int = 0

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.changed)

    def _about(self) -> dict[str, str]:
        return about_files()

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

    def ran(site: Site) -> tuple:
        return site.rule, site.given, site.seen, site.result

    def at_line(site: Site) -> tuple:
        return site.op, site.module, site.where

    def in_file(site: Site) -> tuple:
        return site.op, site.module, os.path.basename(site.where.rpartition(":")[0])

    keys = (lambda site: (at_line(site), ran(site)), at_line, lambda site: (in_file(site), ran(site)), in_file)
    pairs, gone, new = paired(before, after, keys)
    changed = [Pair(*each) for each in pairs if ran(each[0]) != ran(each[1])]
    return LogDiff(new, gone, changed, same=len(pairs) - len(changed))


def paired(
    before: Iterable[T], after: Iterable[T], keys: Iterable[Callable[[T], Hashable]]
) -> tuple[list[tuple[T, T]], list[T], list[T]]:
    """Pair what has the same key, in order: by the first key, then what is left by the next; return both rests, too."""
    pairs, old, new = list[tuple[T, T]](), list(before), list(after)
    for key in keys:
        waiting, left = grouped(old, key), []
        for each in new:
            if same := waiting.get(key(each)):
                pairs.append((same.pop(0), each))
            else:
                left.append(each)
        kept = {id(each) for rest in waiting.values() for each in rest}
        old, new = [each for each in old if id(each) in kept], left
    return pairs, old, new


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
