"""`Row`: one call site under the lists beside itself in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from hmpx.insight.comparing.calls import CallSite
from hmpx.insight.comparing.noise import Distance, Noise, mean_square
from hmpx.insight.module_names import numberless
from hmpx.insight.tensors import LOW, name
from hmpx.insight.text_table import short_places

# Gradient errors in units of the noise between batches; healthy ops lie at 0.001 to 0.01. What training tolerates was
# measured (README.md of insight): from the first on the loss shows it, from the second as much as other first weights.
FELT, BROKEN = 0.1, 0.2
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in LOW}


@dataclass(frozen=True)
class Row:
    """One call site under the lists beside itself in FP32; or the sum over an op or a module.

    Attributes:
        op: its list name; "to" is a cast by hand. where: the caller's line, as file:line. module: the dotted name of
            the module that called it.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        dtypes: what came in, what the op ran on, and what came out.
        calls: how many, over all batches.
        error: relative L2 error of the op alone: its FP32 inputs, cast as the lists say, beside the same in FP32.
        accumulated: relative L2 error of its result in the run under the lists, against that of the run in FP32.
        loss_change: what the error of the op alone does to the loss, to first order: root mean square over batches.
        gradient_error: what it does to the gradients of the parameters, in units of the noise between batches.
        log_prob_change: the mean absolute change of log-probs that the loss returns, in a run of the first batch with
            this op alone in low precision.
        measured: whether loss_change and gradient_error come from runs with this op alone in low precision, of a batch
            or more, those in which it looks worst first; infinite where they end in inf or NaN. Else they are
            estimates, the second right within a factor of two or so unless an index, an order or a mask changes.
        nonfinite: results that are not finite under the lists, and finite in FP32. phase: "forward" or "backward",
            where that is first seen, which does not say that the op is to blame: `measured` does.
        raised: the error that the op raises under the lists, in a line; the comparison goes on with FP32 there.
        decisions: of an op that picks an index, an order or a mask, how many of them the lists change, in words.
        note: what else there is to say, in words.

        is_broken: whether it harms the training by itself: from a gradient error of 0.1 on, as far as is known.

    What does not exist is NaN: the effect on a loss where there is none, noise where there is one batch.

    Example:
        >>> batches = [(torch.randn(8, 4),) for _ in range(2)]
        >>> found = hmpx.compare(model, batches, lambda model, x: model(x).square().mean())
        >>> row = found.rows[0]
        >>> row.op, row.rule, row.calls, row.error < 0.01, row.is_broken
        ('linear', 'bf16', 2, True, False)
    """

    op: str
    where: str = ""
    module: str = ""
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    calls: int = 0
    error: float = 0.0
    accumulated: float = 0.0
    loss_change: float = math.nan
    gradient_error: float = math.nan
    log_prob_change: float = math.nan
    measured: bool = False
    nonfinite: int = 0
    phase: str = ""
    raised: str = ""
    decisions: str = ""
    note: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether it harms the training by itself: from a gradient error of 0.1 on, as far as is known."""
        unmeasured = bool(self.phase) and not self.measured
        return bool(self.raised) or self.gradient_error >= FELT or unmeasured

    @property
    def place(self) -> str:
        """Its line, op and module, as one text."""
        inside = f" in {self.module}" if self.module else ""
        return f"{self.where}: {self.op}{inside}" if self.where else f"{self.op}{inside}"

    def __str__(self) -> str:
        effect = f"gradient error {number(self.gradient_error)}, loss change {number(self.loss_change)}"
        if self.raised:
            return short_places(f"{self.place}: {self.raised}; {self.dtypes}; {self.reason}")
        if self.phase and not self.gradient_error >= FELT:
            effect = f"not finite in the {self.phase} pass, and finite in FP32"
        elif self.gradient_error == math.inf:
            effect = "inf or NaN"
        return short_places(f"{self.place}: {effect}, error of the op alone {number(self.error)}")


def number(value: float) -> str:
    """Format a number with two figures; "-" for NaN."""
    if math.isnan(value):
        return "-"
    return f"{value:.0f}" if 100 <= abs(value) < 1e6 else f"{value:.2g}"


def alike(rows: Iterable[Row]) -> list[Row]:
    """Merge rows of equal blocks: the same op and line in modules whose names differ in their numbers only.

    A merged row has the calls of all, and the other figures of the worst, which `rows` has first. A row that breaks the
    training is not merged with one that does not.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        kind = row.is_broken, row.phase, row.raised
        groups.setdefault((row.op, row.where, numberless(row.module), row.rule, row.dtypes, *kind), []).append(row)
    return [
        replace(group[0], module=numberless(group[0].module), calls=sum(row.calls for row in group))
        if len({row.module for row in group}) > 1
        else group[0]
        for group in groups.values()
    ]


def order(row: Row) -> tuple[float, ...]:
    """Return a key that sorts the worst first: by gradients, inf or NaN, the loss, and the error itself."""
    effects = (row.gradient_error, row.phase != "", row.loss_change, row.accumulated if row.error else 0.0, row.error)
    return (-bool(row.raised), *(-effect if not math.isnan(effect) else 0.0 for effect in effects))


def row_of(site: CallSite, noise: Noise, h: float) -> Row:
    """Return the row of one site, with estimates. h: the length of the shift."""
    note = f"not compared: {site.not_compared}" if site.not_compared else ""
    if not note and noise.batches and not site.differentiable:
        note = "runs without gradients: what it does to the loss is seen in a run of its own only"
    row = Row(
        *(site.op, site.where, site.module, site.rule, site.reason, site.dtypes, len(site.calls)),
        raised=site.raised,
        decisions=f"{site.otherwise} of {site.decided} changed" if site.otherwise else "",
        note=note,
        **_errors(site.alone, site.accumulated),
    )
    if not noise.batches or not site.differentiable:
        return row
    return replace(row, **_effects(site.loss_change, projected(site, h), noise))


def sums(rows: Mapping[CallSite, Row], key: str, noise: Noise, h: float) -> tuple[Row, ...]:
    """Return rows over all sites of an op, or of a module, as `key` says; effects are added up with their signs."""
    found: dict[str, dict[CallSite, Row]] = {}
    for site, row in rows.items():
        found.setdefault(getattr(site, key), {})[site] = row
    heads = {value: Row(value) if key == "op" else Row("", module=value) for value in found}
    return tuple(_sum(heads[value], sites, noise, h) for value, sites in found.items())


def _sum(head: Row, rows: Mapping[CallSite, Row], noise: Noise, h: float) -> Row:
    alone, accumulated = Distance(), Distance()
    for site in rows:
        alone.merge(site.alone)
        accumulated.merge(site.accumulated)
    head = replace(head, **_errors(alone, accumulated), calls=sum(row.calls for row in rows.values()))
    if not noise.batches:
        return head
    changes = [sum(scores) for scores in zip(*(site.loss_change for site in rows), strict=True)]
    along = [sum(scores) for scores in zip(*(projected(site, h) for site in rows), strict=True)]
    head = replace(head, **_effects(changes, along, noise))
    measured = [row for row in rows.values() if row.measured or row.phase or row.raised]
    if not measured:
        return head
    worst = min(measured, key=order)
    keys = ("loss_change", "gradient_error", "measured", "phase", "nonfinite", "raised", "note")
    return replace(head, **{key: getattr(worst, key) for key in keys})


def _errors(alone: Distance, accumulated: Distance) -> dict:
    # A constant that a program takes from the dtype, as for masks, is that of FP32 where the op is computed alone: an
    # overflow that is seen there alone says nothing.
    overflows = bool(accumulated.nonfinite)
    return {
        "error": math.inf if overflows and alone.nonfinite else alone.relative,
        "accumulated": math.inf if overflows else accumulated.relative,
        "nonfinite": accumulated.nonfinite,
    }


def _effects(changes: list[float], along: list[float], noise: Noise) -> dict:
    return {"loss_change": math.sqrt(mean_square(changes)), "gradient_error": noise.in_noise(mean_square(along))}


def projected(site: CallSite, h: float) -> list[float]:
    """Return v . e_b of one site, by batch."""
    return [(shifted - here) / h for here, shifted in zip(site.loss_change, site.shifted, strict=True)]


def mask_note(site: CallSite) -> str:
    """Name the value, that of a mask most of the time, that FP32 holds at a site and the low dtype does not; or ""."""
    for dtype, largest in _LARGEST.items():
        if name(dtype) in site.dtypes.split() and site.largest >= largest * (1 - 2**-9):
            return (
                f"FP32 has {site.largest:.4g} there, and {name(dtype)} ends at {largest:.4g}: if this is a mask, "
                "fill it with torch.finfo(x.dtype).min"
            )
    return ""
