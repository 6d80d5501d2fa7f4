"""`Row`: one call site, or all call sites of an op, under the lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.module_names import numberless
from hmpx.insight.tensors import LOW
from hmpx.insight.text_table import short_places
from hmpx.insight.trials.calls import CallSite

# Gradient errors in units of the noise between batches; healthy ops lie at 0.001 to 0.01. What training tolerates was
# measured (README.md of insight): from the first on the loss shows it, from the second as much as other first weights.
FELT, BROKEN = 0.1, 0.2
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in LOW}


@dataclass(frozen=True)
class Row:
    """One call site under the lists; or all those of an op, or of an op in a module.

    Attributes:
        op: its list name; "to" is a cast by hand. where: the caller's line, as file:line; of several, of the worst or
            the first. module: the dotted name of the module that called it; "" outside of modules, and of an op.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        dtypes: what came in, what the op ran on, and what came out. sites: how many it stands for.
        calls: how many, over all batches.
        gradient_error: what it does to the gradients of the parameters in one batch, the worst, if it alone runs in low
            precision, in units of the noise between batches. NaN where that was not measured.
        loss_change: what it does to the loss in the same run, without a sign.
        log_prob_change: the mean absolute change of log-probs that the loss returns, in a run of the first batch with
            this op alone in low precision.
        phase: "forward" or "backward", where an inf or NaN is first seen that FP32 has not; which does not say that the
            op is to blame: `Comparison.broken` does.
        raised: the error that the op raises under the lists, in a line; the comparison goes on with FP32 there.
        decisions: of an op that picks an index, an order or a mask, how many of them the lists change, in words.
        note: what else there is to say, in words.
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
    loss_change: float = math.nan
    log_prob_change: float = math.nan
    phase: str = ""
    raised: str = ""
    decisions: str = ""
    note: str = ""

    @property
    def place(self) -> str:
        """Its line, op and module, as one text."""
        inside = f" in {self.module}" if self.module else ""
        return f"{self.where}: {self.op}{inside}" if self.where else f"{self.op}{inside}"

    def __str__(self) -> str:
        if self.raised:
            return short_places(f"{self.place}: {self.raised}; {self.dtypes}; {self.reason}")
        if self.phase:
            return short_places(f"{self.place}, in the {self.phase} pass")
        if math.isnan(self.gradient_error):
            return short_places(f"{self.place}: {self.dtypes}; {self.reason}")
        alone = "inf or NaN" if self.gradient_error == math.inf else f"gradient error {number(self.gradient_error)}"
        return short_places(f"{self.place}: by itself {alone}; in {self.dtypes}, {self.reason.removeprefix('none: ')}")


def row_of(sites: Sequence[CallSite], is_op: bool = False) -> Row:
    """Return the row of call sites of one op, the first of which says where it is. is_op: whether these are all."""
    first, changed = sites[0], sum(site.changed for site in sites)
    return Row(
        *(first.op, first.where, "" if is_op else first.module, first.rule, first.reason, first.dtypes, len(sites)),
        calls=sum(site.calls for site in sites),
        raised=first.raised,
        decisions=f"{changed} of {sum(site.decided for site in sites)} changed" if changed else "",
        note=_mask_note(first),
    )


def number(value: float) -> str:
    """Format a number with two figures; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def alike(rows: Iterable[Row]) -> list[Row]:
    """Merge rows of equal blocks: the same op and line in modules whose names differ in their numbers only.

    A merged row has the calls of all, and the other figures of the worst, which `rows` has first.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.where, numberless(row.module), row.rule, row.dtypes, row.raised), []).append(row)
    return [
        replace(group[0], module=numberless(group[0].module), calls=sum(row.calls for row in group))
        if len({row.module for row in group}) > 1
        else group[0]
        for group in groups.values()
    ]


def worst_first(row: Row) -> tuple[bool, float]:
    """Return a key that sorts the worst first."""
    return not row.raised, math.inf if math.isnan(row.gradient_error) else -row.gradient_error


def _mask_note(site: CallSite) -> str:
    """Name the value, that of a mask most of the time, that FP32 holds at a site and the low dtype does not; or ""."""
    for dtype, largest in _LARGEST.items():
        if dtype_name(dtype) in site.dtypes.split() and site.largest >= largest * (1 - 2**-9):
            return (
                f"FP32 has {site.largest:.4g} there, and {dtype_name(dtype)} ends at {largest:.4g}: if this is a mask, "
                "fill it with torch.finfo(x.dtype).min"
            )
    return ""
