"""`Comparison`: what `compare` found, to be printed and saved."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hmpx.insight.comparing.row import BROKEN, FELT, Row, alike, number, worst_first
from hmpx.insight.module_names import numberless
from hmpx.insight.pages import Report, bars, closed, grid, page, plain
from hmpx.insight.text_table import Column, short_dtypes, short_places, table, terminal_width

SCHEMA = 3
_ROWS = 20  # of the table
_LINES = 8  # of ops that are to be in FP32
_WIDTH = 110  # of the text in the page for readers without scripts


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

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> found = hmpx.compare(model, batches, loss, progress=False)
        >>> found.is_broken, found.broken, found.gradient_error < 0.1
        (False, (), True)
        >>> [(row.op, row.rule, row.dtypes) for row in found.rows][0]
        ('linear', 'bf16', 'float32 -> bfloat16')
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

    def _page(self) -> str:
        figures = ("gradient_error", "log_prob_change", "loss_change")
        columns = {
            **{"op": "text", **{name.replace("_", " "): "figure" for name in figures}, "calls": "number"},
            **{"dtypes": "dtypes", "module": "end", "line": "end"},
        }

        def shown(rows: Sequence[Row]) -> list[list]:
            return [
                [
                    *(row.op, *(getattr(row, name) for name in figures)),
                    *(row.calls, short_dtypes(row.dtypes), row.module, short_places(row.where)),
                    [row.where, row.reason, row.phase and f"not finite in the {row.phase} pass", row.raised, row.note],
                ]
                for row in rows
            ]

        names = [(row.op, row.gradient_error, number(row.gradient_error)) for row in self.by_op()[:_ROWS]]
        measured = [each for each in names if not math.isnan(each[1])]
        about = "All calls of an op alone in low precision, in one batch, in units of the noise between batches."
        sections = [
            *([grid("To be in FP32", columns, shown(self.broken))] if self.broken else []),
            *([bars("Gradient error by op", about, measured, FELT)] if measured else []),
            grid("Every site", columns, shown(self.rows)),
            closed("The lists, as one file that hmpx reads", str(self.policy)),
        ]
        return page("compare", "Op lists beside FP32", _verdict(self), sections, _as_text(self, _WIDTH))

    def __str__(self) -> str:
        return _as_text(self, terminal_width())


def _as_text(found: Comparison, width: int) -> str:
    """Return the text of `print(comparison)`, in lines of `width` characters where words and paths allow."""
    lines = list(_verdict(found))
    with_log_probs = [row for row in found.rows if not math.isnan(row.log_prob_change)]
    rows = alike(sorted(with_log_probs, key=lambda row: -row.log_prob_change))
    rows = rows or [row for row in found.by_op() if not math.isnan(row.gradient_error)]
    if rows:
        lines += ["", *_table(rows[:_ROWS], width)]
    if len(rows) > _ROWS:
        lines.append(f"… and {len(rows) - _ROWS} rows that do less")
    return "\n".join(lines)


def _table(rows: Sequence[Row], width: int) -> list[str]:
    def each(text: Callable[[Row], str]) -> list[str]:
        return [text(row) for row in rows]

    def column(title: str, figures: list[str], rank: int = 0) -> list[Column]:
        return [Column(title, figures, rank=rank)] if {*figures} - {"-"} else []

    modules = each(lambda row: row.module)
    return table(
        [
            Column("alone in low precision", each(lambda row: row.op), least=14),
            *column("gradient error", each(lambda row: number(row.gradient_error))),
            *column("loss change", each(lambda row: number(row.loss_change)), 1),
            *column("log-probs", each(lambda row: number(row.log_prob_change))),
            Column("sites", each(lambda row: str(row.sites)), rank=3),
            Column("rule", each(lambda row: row.rule or "-"), rank=4),
            Column("dtypes", each(lambda row: short_dtypes(row.dtypes)), least=12, rank=2),
            *([Column("module", modules, least=12, from_left=True, rank=1)] if any(modules) else []),
            Column("line", each(lambda row: os.path.basename(row.where)), least=14, from_left=True),
        ],
        width,
    )


def _verdict(found: Comparison) -> Iterator[str]:
    """Yield the conclusions, in sentences."""
    if found.stopped:
        yield short_places(f"stopped: {found.stopped}.")
        return
    for row in alike([row for row in found.broken if row.raised]):
        yield f"raises under the lists: {row}. The comparison goes on with FP32 there"
    error = found.gradient_error
    if error == math.inf:
        yield "broken: the gradients have inf or NaN, and in FP32 they are finite"
    elif not math.isnan(error):
        said, bias = "broken" if found.is_broken else "tolerable" if error >= FELT else "healthy", found.gradient_bias
        yield f"{said}: gradient error {number(error)}, bias {number(bias)} (another training begins at {BROKEN:g})"
    else:
        yield "gradient errors have no unit: give two batches or more that differ; the noise between them is the unit"
    finite = math.isfinite(found.loss_change)
    change = f"the lists change it by {found.loss_change:+.2g}" if finite else "under the lists it is not finite"
    yield f"the loss is {found.loss:.6g} in FP32; {change}"
    if not math.isnan(found.log_prob_change):
        yield f"the lists change log-probs by {number(found.log_prob_change)} in the mean"
    if (first := found.first_nonfinite) is not None:
        victim = found.broken and not any((row.op, row.module) == (first.op, first.module) for row in found.broken)
        why = "; its inputs are wrong: with the ops below in FP32 it is finite" if victim else ""
        yield f"first inf or NaN: {first}{why}{f'; {first.note}' if first.note else ''}"
    yield from _culprits(found)
    changed = [row for row in found.rows if row.decisions]
    if changed and not error < FELT:
        yield "the lists change decisions:"
        yield from (short_places(f"  {row.place}: {row.decisions}") for row in alike(changed)[:_LINES])


def _culprits(found: Comparison) -> Iterator[str]:
    """Yield what is to be in FP32, and what that brings."""
    rows = alike(row for row in found.broken if not row.raised)
    if rows:
        then = f" (the gradient error of the lists is {number(found.advised)} then)" if found.advised >= 0 else ""
        yield f"keep in FP32: {_in_fp32(found.broken, found.names)}{then}; or let hmpx.tune find the lists"
        yield from (f"  {row}" for row in rows[:_LINES])
        if rows[_LINES:]:
            yield f"  … and {len(rows) - _LINES} more"
        if not any(row.gradient_error >= FELT for row in rows):
            yield "none of these breaks the training by itself: their errors add up"
    elif not math.isnan(found.advised):
        said = f"with every op in FP32 the gradient error is {number(found.advised)} already"
        yield f"{said}, because of the weights, or of casts that no wrapper reaches"
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
