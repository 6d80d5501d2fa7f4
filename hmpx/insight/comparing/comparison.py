"""`Comparison`: what `compare` found, to be printed and saved."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hmpx.insight.comparing.row import BROKEN, FELT, Row, alike, number, order
from hmpx.insight.module_names import numberless
from hmpx.insight.pages import Report, filled
from hmpx.insight.text_table import Column, short_dtypes, short_places, table, terminal_width
from hmpx.insight.text_table import number as count

SCHEMA = 2
_MAGNIFIED = 10  # an op whose own error is so many times another's makes it itself
_ROWS = 20  # of the table
_LINES = 8  # of ops that each break it
_WIDTH = 110  # of the text in the page for readers without scripts


@dataclass(frozen=True)
class Comparison(Report):
    """What lists do to a model, op by op. It prints as a table, the worst first.

    Attributes:
        rows: a `Row` for each call site. gradient_error, gradient_bias: of the lists as a whole, measured, in units of
            the noise between batches; above 0.2 the training is another one. NaN without a loss or with one batch.
        loss, loss_change: the FP32 loss, and what the lists add to it, means over batches.
        log_prob_change: by how much the lists change the log-probs that the loss returns, in the mean over all of them,
            without signs; NaN where it returns none.
        first_nonfinite: the row of the op where something first is not finite that is finite in FP32; None if nothing
            is. It is where that is seen; what is to blame stands in `broken`.
        rest: the gradient error of all ops together that do not break it alone, in one batch; NaN where that was not
            measured. together: the rows of a group that breaks it together where no single op does, as far as found.
        advice: the rows that are to be in FP32, with all of the same name in the same module. advised: the gradient
            error of the lists with these in FP32, measured in all batches; where `advice` is empty, that with every op
            in FP32, which is still too much. NaN where nothing is to be mended.
        stopped: why the comparison could not go on, in words: FP32 itself is not finite, or the program raises under
            the lists outside of any op; "" where it did.
        passes: how many runs of the model it took. policy: the lists, as a file.

    `by_op()` and `by_module()` are sums, `worst(n)` the n rows that do most to the training, `broken` those that break
    it alone; `is_broken` says whether the lists as a whole do. `json(path)` saves everything, `as_json()` is the same
    as objects, `html(path)` a page.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(4)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> found = hmpx.compare(model, batches, loss)
        >>> [(row.op, row.rule, row.dtypes) for row in found.rows][0]
        ('linear', 'bf16', 'float32 -> bfloat16')
        >>> found.gradient_error < 0.1, found.first_nonfinite
        (True, None)
    """

    rows: tuple[Row, ...]
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
    loss: float = math.nan
    loss_change: float = math.nan
    log_prob_change: float = math.nan
    first_nonfinite: Row | None = None
    rest: float = math.nan
    together: tuple[Row, ...] = ()
    advice: tuple[Row, ...] = ()
    advised: float = math.nan
    stopped: str = ""
    passes: int = 0
    policy: str = ""
    _ops: tuple[Row, ...] = field(default=(), repr=False)
    _modules: tuple[Row, ...] = field(default=(), repr=False)

    def by_op(self) -> list[Row]:
        """Return a row for each op, the worst first; effects of its sites are added up with their signs."""
        return sorted(self._ops, key=order)

    def by_module(self) -> list[Row]:
        """Return a row for each module, the worst first. The ops that a submodule calls count for it alone."""
        return sorted(self._modules, key=order)

    def worst(self, n: int = 5) -> list[Row]:
        """Return the n rows that do most to the training; not those of the largest error, which says little about it.

        Where several break it about equally, within a factor of two, one that makes a large error of small ones is
        first.
        """
        rows = sorted(self.rows, key=order)
        if rows and rows[0].gradient_error >= FELT and not rows[0].phase:
            equal = [row for row in rows if row.gradient_error >= max(rows[0].gradient_error / 2, FELT)]
            largest = max(equal, key=lambda row: row.error)
            if largest.error > _MAGNIFIED * rows[0].error:
                rows.insert(0, rows.pop(rows.index(largest)))
        return rows[:n]

    @property
    def is_broken(self) -> bool:
        """Whether there is another training or none: an op raises, something is not finite, gradients are off."""
        raised = any(row.raised for row in self.rows)
        return bool(self.stopped) or raised or self.first_nonfinite is not None or self.gradient_error >= BROKEN

    @property
    def broken(self) -> list[Row]:
        """The rows that break the training by themselves, the worst first. Estimates do not count."""
        known = [row for row in self.worst(len(self.rows)) if row.measured or row.phase or row.raised]
        return [row for row in known if row.is_broken]

    def as_json(self) -> dict[str, Any]:
        """Return the attributes, with `by_op` and `by_module`, as objects; NaN is null."""
        found = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name[0] != "_"}
        found |= {"by_op": self.by_op(), "by_module": self.by_module()}
        return plain({"schema": SCHEMA, **found})

    def _page(self) -> str:
        shown = {**self.as_json(), "worst": plain(self.worst(len(self.rows))), "verdict": list(_verdict(self))}
        shown |= {"broken": FELT, "is_broken": self.is_broken}
        return filled(str(__package__), "compare", _as_text(self, _WIDTH), shown)

    def __str__(self) -> str:
        return _as_text(self, terminal_width())


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: rows as objects, null for NaN, and "inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Row):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def _as_text(found: Comparison, width: int) -> str:
    """Return the text of `print(comparison)`, in lines of `width` characters where words and paths allow."""
    if found.stopped:
        return "\n".join(_verdict(found))
    rows = alike(found.worst(len(found.rows)))
    lines = [*_verdict(found), "", *_table(rows[:_ROWS], width)]
    if len(rows) > _ROWS:
        lines.append(f"… and {len(rows) - _ROWS} rows that do less")
    if any("*" in row.module for row in rows[:_ROWS]):
        lines.append("* stands for the numbers of equal blocks; the figures are those of the worst of these blocks")
    if any(_is_estimate(row) for row in rows[:_ROWS]):
        lines.append("~ marks an estimate; the other figures are measured, in runs of this op alone")
    return "\n".join(lines)


def _table(rows: Sequence[Row], width: int) -> list[str]:
    def each(text: Callable[[Row], str]) -> list[str]:
        return [text(row) for row in rows]

    log_probs = each(lambda row: number(row.log_prob_change))
    return table(
        [
            Column("op", each(lambda row: row.op), least=14),
            Column("gradient error", each(lambda row: number(row.gradient_error) + " ~" * _is_estimate(row))),
            Column("loss change", each(lambda row: number(row.loss_change)), rank=1),
            *([Column("log-probs", log_probs)] if {*log_probs} - {"-"} else []),
            Column("error", each(lambda row: number(row.error))),
            Column("accumulated", each(lambda row: number(row.accumulated)), rank=3),
            Column("rule", each(lambda row: row.rule or "-"), rank=4),
            Column("dtypes", each(lambda row: short_dtypes(row.dtypes)), least=12, rank=2),
            Column("module", each(lambda row: row.module), least=12, from_left=True, rank=1),
            Column("line", each(lambda row: os.path.basename(row.where)), least=14, from_left=True),
        ],
        width,
    )


def _is_estimate(row: Row) -> bool:
    return not row.measured and row.gradient_error > 0


def _verdict(found: Comparison) -> Iterator[str]:
    """Yield the conclusions, in sentences."""
    if found.stopped:
        yield short_places(f"stopped: {found.stopped}.")
        return
    for row in alike([row for row in found.rows if row.raised]):
        yield f"raises under the lists: {row}. The comparison goes on with FP32 there"
    error = found.gradient_error
    if error == math.inf:
        yield "broken: the gradients have inf or NaN, and in FP32 they are finite"
    elif not math.isnan(error):
        said, bias = "broken" if found.is_broken else "tolerable" if error >= FELT else "healthy", found.gradient_bias
        yield f"{said}: gradient error {number(error)}, bias {number(bias)} (another training begins at {BROKEN:g})"
    elif not math.isnan(found.loss):
        yield "gradient errors have no unit: give two batches or more that differ; the noise between them is the unit"
    else:
        yield "only results are compared: give loss(model, *batch) to see what errors do to the training"
    if not math.isnan(found.loss):
        finite = math.isfinite(found.loss_change)
        change = f"the lists change it by {found.loss_change:+.2g}" if finite else "under the lists it is not finite"
        yield f"the loss is {found.loss:.6g} in FP32; {change}"
    if not math.isnan(found.log_prob_change):
        yield f"the lists change log-probs by {number(found.log_prob_change)} in the mean"
    if (first := found.first_nonfinite) is not None:
        victim = "; alone it stays finite, so its inputs are wrong" if first.measured and not first.is_broken else ""
        yield f"first inf or NaN: {first}{victim}{f'; {first.note}' if first.note else ''}"
    yield from _culprits(found)
    changed = [row for row in found.rows if row.decisions]
    if changed and error >= FELT:
        yield "the lists change decisions, which no estimate (~) sees:"
        yield from (short_places(f"  {row.place}: {row.decisions}") for row in alike(changed)[:_LINES])


def _culprits(found: Comparison) -> Iterator[str]:
    """Yield which ops break it alone, as far as that was measured, and what to do."""
    broken = [row for row in found.broken if not row.raised]
    verb = "break" if found.is_broken else "harm"
    alone, known = alike(broken), count(sum(row.measured for row in found.rows), "op was", "ops were")
    if len(alone) > 1:
        yield f"{len(alone)} ops each {verb} the training by themselves:"
        yield from _listed(alone)
    elif alone:
        yield f"one op {verb}s the training by itself: {alone[0]}"
    elif found.together:
        acquitted = f"{known} measured, and none breaks the training by itself"
        yield f"{acquitted}; these {verb} it together, and neither half of them does:"
        yield from _listed(alike(found.together))
    elif found.gradient_error >= FELT:
        yield f"{known} measured, and none breaks the training by itself; the others were not measured"
    if alone and not math.isnan(found.rest):
        does = f"{verb} it, too" if found.rest >= FELT else f"do not {verb} it"
        yield f"all other ops together {does}: gradient error {number(found.rest)}"
    if found.advice:
        then = f"the gradient error of the lists is {number(found.advised)} then"
        yield f"keep in FP32: {_in_fp32(found.advice, found.rows)} ({then}); or let hmpx.tune find the lists"
    elif not math.isnan(found.advised):
        said = f"with every op in FP32 the gradient error is {number(found.advised)} already"
        yield f"{said}: because of the weights, or of casts that no wrapper reaches"


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    yield from (f"  {row}" for row in rows[:_LINES])
    if rows[_LINES:]:
        yield f"  … and {len(rows) - _LINES} more"


def _in_fp32(broken: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return what is to run in FP32: a name, with its module where it does no harm in others; or a cast to remove."""
    said: dict[str, None] = {}
    for row in alike(broken):
        others = [each for each in rows if each.op == row.op and each not in broken and each.error]
        elsewhere = any(numberless(each.module) != row.module for each in others)
        if row.op == "to":
            said[f"the cast by hand at {short_places(row.where)}"] = None
        else:
            said[f"{row.op} in {row.module}" if elsewhere and row.module else row.op] = None
    return ", ".join(said)
