"""`Comparison`: what `compare` found, to be printed and saved."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hmpx.insight.comparing.row import BROKEN, FELT, Row, alike, number, worst_first
from hmpx.insight.module_names import numberless
from hmpx.insight.report import Bars, Field, Grid, Lines, Report, plain
from hmpx.insight.text_table import short_dtypes, short_places

SCHEMA = 3
_LINES = 8  # of ops that are to be in FP32
_LIMIT = f"another training begins at {BROKEN:g}"
_BARS = 20  # of the picture in the page


@dataclass(frozen=True)
class Comparison(Report):
    """What lists do to the training of a model, and which ops are to blame. It prints as a verdict and a table.

    Attributes:
        rows: a `Row` for each call site, in the order in which they were met.
        broken: the rows that must be in FP32, the worst first: ops that raise, then a row for each name in each module.
        advised: the gradient error of the lists with `broken` in FP32, measured on all batches. Where every op in FP32
            is not enough, that error, and `broken` has no more than ops that raise. NaN where nothing is to be mended.
        gradient_error: of the lists as a whole, in units of the noise between batches; from 0.2 on the training is
            another one. gradient_bias: the part of it that is the same in every batch, in the same units. NaN with
            one batch.
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

    rows: tuple[Row, ...]
    broken: tuple[Row, ...] = ()
    advised: float = math.nan
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
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
        """Whether there is another training or none: an op raises, something is not finite, gradients are off."""
        raised = any(row.raised for row in self.rows)
        return bool(self.stopped) or raised or self.first_nonfinite is not None or self.gradient_error >= BROKEN

    def as_json(self) -> dict[str, Any]:
        """Return the attributes as objects; NaN is null."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return plain({"schema": SCHEMA, **found, "is_broken": self.is_broken})

    def _title(self) -> tuple[str, str]:
        return "compare", "Op lists beside FP32"

    def _lines(self) -> Iterator[str]:
        return _verdict(self)

    def _sections(self) -> Iterator[Grid | Lines | Bars]:
        with_log_probs = [row for row in self.rows if not math.isnan(row.log_prob_change)]
        rows = alike(sorted(with_log_probs, key=lambda row: -row.log_prob_change))
        rows = rows or [row for row in self.by_op() if not math.isnan(row.gradient_error)]
        yield Grid(_FIELDS, rows, more=lambda rest: f"{len(rest)} rows that do less")
        yield Grid(_FIELDS, self.broken, shown=(), notes=_notes, page="To be in FP32")
        about = "All calls of an op alone in low precision, in one batch, in units of the noise between batches."
        errors = [(row.op, row.gradient_error, number(row.gradient_error)) for row in self.by_op()[:_BARS]]
        yield Bars("Gradient error by op", about, [each for each in errors if not math.isnan(each[1])], FELT)
        yield Grid(_FIELDS, self.rows, shown=(), notes=_notes, page="Every site")
        yield Lines("The lists, as one file that hmpx reads", self.policy.splitlines(), closed=True)


def _figure(title: str, figure: Callable[[Row], float], rank: int = 0) -> Field:
    return Field(title, lambda row: number(figure(row)), "figure", figure, rank=rank)


_FIELDS = (
    Field("alone in low precision", lambda row: row.op, page=False, least=14),
    Field("op", lambda row: row.op, page=True),
    _figure("gradient error", lambda row: row.gradient_error),
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
    """Yield the conclusions, in sentences."""
    if found.stopped:
        yield short_places(f"stopped: {found.stopped}.")
        return
    for row in alike([row for row in found.broken if row.raised]):
        yield f"raises under the lists: {row}. The comparison goes on with FP32 there"
    error, label = found.gradient_error, "symptom" if found.is_broken else "measured"
    if error == math.inf:
        yield "BROKEN: the gradients have inf or NaN, and in FP32 they are finite"
    elif not math.isnan(error):
        said, bias = "BROKEN" if found.is_broken else "tolerable" if error >= FELT else "healthy", found.gradient_bias
        at = "" if found.is_broken else " at these weights"  # a training may break later
        yield f"{said}{at}: gradient error {number(error)}, bias {number(bias)} ({_LIMIT})"
    else:
        yield "gradient errors have no unit, which is the noise between batches: give two batches or more that differ"
    yield from _labelled(label, _symptoms(found))
    yield from _labelled("cause", _causes(found))
    yield from _labelled("fix", _fixes(found))
    changed = [row for row in found.rows if row.decisions]
    if changed and not error < FELT:
        yield "the lists change decisions:"
        yield from (short_places(f"  {row.place}: {row.decisions}") for row in alike(changed)[:_LINES])


def _labelled(label: str, lines: Iterable[str]) -> Iterator[str]:
    """Yield lines, the first beside a label, and the others beneath it."""
    for i, line in enumerate(lines):
        yield f"{'' if i else label:9}{line}"


def _symptoms(found: Comparison) -> Iterator[str]:
    finite = math.isfinite(found.loss_change)
    change = f"the lists change it by {found.loss_change:+.2g}" if finite else "under the lists it is not finite"
    yield f"the loss is {found.loss:.6g} in FP32; {change}"
    if not math.isnan(found.log_prob_change):
        yield f"the lists change log-probs by {number(found.log_prob_change)} in the mean"
    if (first := found.first_nonfinite) is not None:
        victim = found.broken and not any((row.op, row.module) == (first.op, first.module) for row in found.broken)
        why = "; its inputs are wrong: with the fix it is finite" if victim else ""
        yield f"first inf or NaN: {first}{why}{f'; {first.note}' if first.note else ''}"


def _causes(found: Comparison) -> Iterator[str]:
    rows = alike(row for row in found.broken if not row.raised)
    yield from map(str, rows[:_LINES])
    if rows[_LINES:]:
        yield f"… and {len(rows) - _LINES} more"
    if rows and not any(row.gradient_error >= FELT for row in rows):
        yield "none of these breaks the training by itself: their errors add up"
    if not rows and not math.isnan(found.advised):
        said = f"with every op in FP32 the gradient error is {number(found.advised)} already"
        yield f"{said}, because of the weights, or of casts that no wrapper reaches"


def _fixes(found: Comparison) -> Iterator[str]:
    """Yield what is to be in FP32, and what that brings."""
    if any(not row.raised for row in found.broken):
        then = f" (measured: gradient error {number(found.advised)}; {_LIMIT})" if found.advised >= 0 else ""
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
