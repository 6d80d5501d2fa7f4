"""`Comparison`: what `compare` found, and its `Row`s: a call site, or all call sites of an op, under the lists."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hmpx.base.tensors import dtype_name
from hmpx.insight.finding import at_place, numberless, short_places
from hmpx.insight.report import Bars, Field, Grid, Lines, Report, grouped, short_dtypes
from hmpx.insight.tensors import LOW
from hmpx.insight.trials.calls import RunSite
from hmpx.insight.trials.runs import PART, Felt, largest_of

# Gradient errors in units of the noise between batches; healthy ops lie at 0.001 to 0.01. What training tolerates was
# measured (README.md of insight): from the first on the loss shows it, from the second as much as other first weights.
FELT, BROKEN = 0.1, 0.2
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in LOW}
_END = torch.finfo(torch.bfloat16).max  # a value above it is the end of the range of FP32


@dataclass(frozen=True)
class Row(Felt):
    """One call site under the lists; or all those of an op, or of an op in a module.

    Attributes:
        op: its list name; "to" is a cast by hand. where: the caller's line, as file:line; of several, of the worst or
            the first. module: the dotted name of the module that called it; "" outside of modules, and of an op.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        dtypes: what came in, what the op ran on, and what came out. sites: how many it stands for.
        calls: how many, over all batches.
        gradient_error: what it does to the gradients of the parameters in one batch, the worst, if it alone runs in low
            precision, in units of the noise between batches. NaN where that was not measured.
        part: the parameter whose gradient it changes most. part_error: by how much, beside the size of that gradient.
        loss_change: what it does to the loss in the same run, without a sign.
        log_prob_change: the mean absolute change of log-probs that the loss returns, in a run of the first batch with
            this op alone in low precision.
        phase: "forward" or "backward", where an inf or NaN is first seen that FP32 has not; which does not say that the
            op is to blame: `Comparison.broken` does.
        raised: the error that the op raises under the lists, in a line; the comparison goes on with FP32 there.
        decisions: of an op that picks an index, an order or a mask, how many of them the lists change, in words.
        note: what else there is to say, in words.
        is_fill: whether FP32 holds the end of its range there, which is what masks are filled with.
    """

    op: str
    where: str = ""
    module: str = ""
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    sites: int = 1
    calls: int = 0
    gradient_error: float = math.nan
    part_error: float = math.nan
    part: str = ""
    loss_change: float = math.nan
    log_prob_change: float = math.nan
    phase: str = ""
    raised: str = ""
    decisions: str = ""
    note: str = ""
    is_fill: bool = False

    @property
    def place(self) -> str:
        """Its line, op and module, as one text."""
        return at_place(self.where, self.op, self.module)

    def __str__(self) -> str:
        if self.raised:
            return short_places(f"{self.place}: {self.raised}; {self.dtypes}; {self.reason}")
        if self.phase:
            return short_places(f"{self.place}, in the {self.phase} pass")
        if math.isnan(self.felt):
            return short_places(f"{self.place}: {self.dtypes}; {self.reason}")
        alone = f"gradient error {two_digits(self.gradient_error)}"
        if self.felt > largest_of(self.gradient_error, 0):
            alone = f"the gradient of {self.part} off by {two_digits(self.part_error)} of its size"
        alone = "inf or NaN" if self.felt == math.inf else alone
        return short_places(f"{self.place}: by itself {alone}; in {self.dtypes}, {self.reason.removeprefix('none: ')}")


def row_of(sites: Sequence[RunSite], is_op: bool = False) -> Row:
    """Return the row of call sites of one op, the first of which says where it is. is_op: whether these are all."""
    first, changed = sites[0], sum(site.changed for site in sites)
    return Row(
        *(first.op, first.where, "" if is_op else first.module, first.rule, first.reason, first.dtypes, len(sites)),
        calls=sum(site.calls for site in sites),
        raised=first.raised,
        decisions=f"{changed} of {sum(site.decided for site in sites)} changed" if changed else "",
        note=_mask_note(first),
        is_fill=first.largest >= _END,
    )


def two_digits(value: float) -> str:
    """Format a number with two figures; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def alike(rows: Iterable[Row]) -> list[Row]:
    """Merge rows of equal blocks: the same op and line in modules whose names differ in their numbers only.

    A merged row has the calls of all, and the other figures of the worst, which `rows` has first.
    """
    groups = grouped(rows, lambda row: (row.op, row.where, numberless(row.module), row.rule, row.dtypes, row.raised))
    return [
        replace(group[0], module=numberless(group[0].module), calls=sum(row.calls for row in group))
        if len({row.module for row in group}) > 1
        else group[0]
        for group in groups.values()
    ]


def worst_first(row: Row) -> tuple[bool, float]:
    return not row.raised, math.inf if math.isnan(row.felt) else -row.felt


def _mask_note(site: RunSite) -> str:
    """Name the value, that of a mask most of the time, that FP32 holds at a site and the low dtype does not; or ""."""
    for dtype, largest in _LARGEST.items():
        if dtype_name(dtype) in site.dtypes.split() and site.largest >= largest * (1 - 2**-9):
            return (
                f"FP32 has {site.largest:.4g} there, and {dtype_name(dtype)} ends at {largest:.4g}: if this is a mask, "
                "fill it with torch.finfo(x.dtype).min"
            )
    return ""


_LINES = 8  # of ops that are to be in FP32
_LIMIT = f"another training begins at {BROKEN:g}"
_OF_PART = f"another training begins at {BROKEN / PART:g}"
_BARS = 20  # of the picture in the page


@dataclass(frozen=True)
class Comparison(Felt, Report):
    """What lists do to the training of a model, and which ops are to blame. It prints as a verdict and a table.

    Attributes:
        rows: a `Row` for each call site, in the order in which they were met.
        broken: the rows that must be in FP32, the worst first: ops that raise, then a row for each name in each module.
        advised: the gradient error of the lists with `broken` in FP32, measured on all batches. advised_part: that
            of the worst parameter. Where every op in FP32 is not enough, the errors then, and `broken` has no more than
            ops that raise. NaN where nothing is to be mended.
        gradient_error: of the lists as a whole, in units of the noise between batches; from 0.2 on the training is
            another one. gradient_bias: the part of it that is the same in every batch, in the same units. NaN with
            one batch.
        part: the parameter whose gradient is off most. part_error: by how much, beside its own size; from 0.5 on this
            part of the model has another training.
        loss, loss_change: the FP32 loss, and what the lists add to it, means over batches.
        log_prob_change: by how much the lists change the log-probs that the loss returns, in the mean over all of them,
            without signs; NaN where it returns none.
        first_nonfinite: the row of the op where something first is not finite that is finite in FP32; None if nothing
            is. It is where that is seen; what is to blame stands in `broken`.
        is_cut_short: whether the search has ended at its number of runs; fewer ops may be enough then.
        stopped: why the comparison could not go on, in words: FP32 itself is not finite, or the program raises under
            the lists outside of any op; "" where it did.
        names: a row for each list name that ran in low precision, with all its call sites.
        passes: how many runs of the model it took. policy: the lists, as a file.

    `by_op()` are the names, and `worst(n)` n rows, those that do most to the training first; `is_broken` says whether
    the lists as a whole break it. `json(path)` saves everything, `as_json()` is the same as objects, `html(path)` a
    page.
    """

    _schema = 3
    _title = "compare", "Op lists beside FP32"
    _labels = ("symptom", "measured", "cause", "fix")
    rows: tuple[Row, ...]
    broken: tuple[Row, ...] = ()
    advised: float = math.nan
    advised_part: float = math.nan
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
    part_error: float = math.nan
    part: str = ""
    loss: float = math.nan
    loss_change: float = math.nan
    log_prob_change: float = math.nan
    first_nonfinite: Row | None = None
    is_cut_short: bool = False
    stopped: str = ""
    names: tuple[Row, ...] = field(default=(), repr=False)
    passes: int = 0
    policy: str = ""

    def by_op(self) -> list[Row]:
        """Return the row of each list name that ran in low precision, the worst first."""
        return sorted(self.names, key=worst_first)

    def worst(self, n: int = 5) -> list[Row]:
        """Return n rows: those that must be in FP32, then names, those that do most to the training first."""
        blamed = {row.op for row in self.broken}
        return [*self.broken, *(row for row in self.by_op() if row.op not in blamed)][:n]

    @property
    def is_broken(self) -> bool:
        """Whether there is another training or none: an op raises, something is not finite, gradients are off.

        A mask that is -inf where FP32 has the end of its range breaks nothing by itself.
        """
        raised, first = any(row.raised for row in self.rows), self.first_nonfinite
        wrong = first is not None and not (first.is_fill and self.felt < BROKEN)
        return bool(self.stopped) or raised or wrong or self.felt >= BROKEN

    def as_json(self) -> dict[str, Any]:
        """Return the attributes as objects of JSON, by their names; null for NaN."""
        return {**super().as_json(), "is_broken": self.is_broken}

    def _lines(self) -> Iterator[str]:
        return _verdict(self)

    def _sections(self) -> Iterator[Grid | Lines | Bars]:
        with_log_probs = [row for row in self.rows if not math.isnan(row.log_prob_change)]
        rows = alike(sorted(with_log_probs, key=lambda row: -row.log_prob_change))
        rows = rows or [row for row in self.by_op() if not math.isnan(row.felt)]
        yield Grid(_FIELDS, rows, more=lambda rest: f"{len(rest)} rows that do less")
        yield Grid(_FIELDS, self.broken, shown=(), notes=_notes, page="To be in FP32")
        about = "All calls of an op alone in low precision, in one batch, in units of the noise between batches."
        errors = [(row.op, row.gradient_error, two_digits(row.gradient_error)) for row in self.by_op()[:_BARS]]
        known = [each for each in errors if not math.isnan(each[1])]
        yield Bars("Gradient error by op", about, known, FELT, f"from {FELT:g} on the loss shows it")
        yield Grid(_FIELDS, self.rows, shown=(), notes=_notes, page="Every site")
        yield Lines("The lists, as one file that hmpx reads", self.policy.splitlines(), closed=True)


def _figure(title: str, figure: Callable[[Row], float], rank: int = 0) -> Field:
    return Field(title, lambda row: two_digits(figure(row)), "figure", figure, rank=rank)


_FIELDS = (
    Field("alone in low precision", lambda row: row.op, page=False, least=14),
    Field("op", lambda row: row.op, page=True),
    _figure("gradient error", lambda row: row.gradient_error),
    _figure("worst parameter", lambda row: row.part_error, rank=2),
    _figure("loss change", lambda row: row.loss_change, rank=2),
    _figure("log-probs", lambda row: row.log_prob_change),
    Field("sites", lambda row: str(row.sites), page=False, rank=3),
    Field("calls", kind="number", value=lambda row: row.calls, page=True),
    Field("rule", lambda row: row.rule or "-", rank=1),
    Field("in -> out", lambda row: short_dtypes(row.dtypes), "dtypes", least=12, rank=2),
    Field("module", lambda row: row.module, "end", least=12, rank=1),
    Field("line", lambda row: os.path.basename(row.where), "end", least=14),
)


def _notes(row: Row) -> Iterator[str]:
    yield from (row.where, row.reason, row.phase and f"not finite in the {row.phase} pass", row.raised, row.note)


def _verdict(found: Comparison) -> Iterator[str]:
    if found.stopped:
        yield short_places(f"stopped: {found.stopped}.")
        return
    for row in alike([row for row in found.broken if row.raised]):
        yield f"raises under the lists: {row}. The comparison goes on with FP32 there"
    error, label = found.gradient_error, "symptom" if found.is_broken else "measured"
    if error == math.inf:
        yield "BROKEN: the gradients have inf or NaN, and in FP32 they are finite"
    elif _is_of_part(found):
        yield f"BROKEN: {_worst(found)}"
    elif not math.isnan(error):
        said = "BROKEN" if found.is_broken else "tolerable" if found.felt >= FELT else "healthy"
        yield f"{said}{'' if found.is_broken else ' at these weights'}: {_whole(found)}"  # a training may break later
    if math.isnan(error):
        yield "gradient errors have no unit, which is the noise between batches: give two batches or more that differ"
    yield from _labelled(label, _symptoms(found))
    yield from _labelled("cause", _causes(found))
    yield from _labelled("fix", _fixes(found))
    changed = [row for row in found.rows if row.decisions]
    if changed and not found.felt < FELT:
        yield "the lists change decisions:"
        yield from (short_places(f"  {row.place}: {row.decisions}") for row in alike(changed)[:_LINES])


def _is_of_part(found: Comparison) -> bool:
    """Return whether it is one parameter alone that breaks the training."""
    return found.felt >= BROKEN > largest_of(found.gradient_error, 0)


def _whole(found: Comparison) -> str:
    return f"gradient error {two_digits(found.gradient_error)}, bias {two_digits(found.gradient_bias)} ({_LIMIT})"


def _worst(found: Comparison) -> str:
    off = two_digits(found.part_error)
    return f"the gradient of {found.part}, the worst parameter, is off by {off} of its size ({_OF_PART})"


def _advised(found: Comparison) -> str:
    """Return the errors with what is advised in FP32; "" if they were not measured."""
    whole, part = found.advised, found.advised_part
    of_part = f", {two_digits(part)} of one parameter," if PART * part > largest_of(whole, 0) else ""
    return "" if math.isnan(whole) and not of_part else two_digits(whole) + of_part


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, the first beside a label, and the others beneath it."""
    for i, line in enumerate(lines):
        yield f"{'' if i else label:9}{line}"


def _symptoms(found: Comparison) -> Iterator[str]:
    finite = math.isfinite(found.loss_change)
    change = f"the lists change it by {found.loss_change:+.2g}" if finite else "under the lists it is not finite"
    yield f"the loss is {found.loss:.6g} in FP32; {change}"
    if found.part and not _is_of_part(found):
        yield _worst(found)
    elif found.part and not math.isnan(found.gradient_error):
        yield _whole(found)
    if not math.isnan(found.log_prob_change):
        yield f"the lists change log-probs by {two_digits(found.log_prob_change)} in the mean"
    if (first := found.first_nonfinite) is not None:
        victim = found.broken and not any((row.op, row.module) == (first.op, first.module) for row in found.broken)
        why = "; its inputs are wrong: with the fix it is finite" if victim else ""
        yield f"first inf or NaN: {first}{why}{f'; {first.note}' if first.note else ''}"


def _causes(found: Comparison) -> Iterator[str]:
    rows = alike(row for row in found.broken if not row.raised)
    yield from map(str, rows[:_LINES])
    if rows[_LINES:]:
        yield f"… and {len(rows) - _LINES} more"
    if rows and not any(row.felt >= FELT for row in rows):
        yield "none of these breaks the training by itself: their errors add up"
    if not rows and (errors := _advised(found)):
        said = f"with every op in FP32 the gradient error is {errors} already"
        yield f"{said}, because of the weights, or of casts that no wrapper reaches"


def _fixes(found: Comparison) -> Iterator[str]:
    if any(not row.raised for row in found.broken):
        then = f" (measured: gradient error {errors.rstrip(',')}; {_LIMIT})" if (errors := _advised(found)) else ""
        yield f"keep in FP32: {_in_fp32(found.broken, found.names)}{then}; or let hmpx.tune find the lists"
    if found.is_cut_short:
        yield f"the search has ended after {found.passes} runs: fewer ops may be enough"


def _in_fp32(broken: Sequence[Row], names: Sequence[Row]) -> str:
    """Return what is to run in FP32: a name, with its module where it may stay in others; or a cast to remove."""
    sites = {row.op: row.sites for row in names}
    said: dict[str, None] = {}
    for row in broken:
        everywhere = sum(each.sites for each in broken if each.op == row.op) >= sites.get(row.op, 0)
        if row.op == "to":
            said[f"the cast by hand at {short_places(row.where)}"] = None
        else:
            said[row.op if everywhere or not row.module else f"{row.op} in {numberless(row.module)}"] = None
    return ", ".join(said)
