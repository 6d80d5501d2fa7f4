"""Rows of a comparison, made of what was gathered at the sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from hmpx.insight.comparing.calls import Compared
from hmpx.insight.comparing.difference import Difference, Distance
from hmpx.insight.comparing.noise import Noise, biased_square, by_direction, mean_square
from hmpx.insight.comparing.row import Row
from hmpx.insight.tensors import LOW, name

_LARGEST = {dtype: torch.finfo(dtype).max for dtype in LOW}


def row_of(site: Compared, noise: Noise, h: float) -> Row:
    """What one site came to."""
    row = Row(site.op, site.where, site.module, site.rule, site.reason, site.dtypes, calls=len(site.calls))
    note = site.not_compared and f"not compared: {site.not_compared}"
    row = replace(row, **_measures(site.alone, site.accumulated), note=note)
    if not noise.batches:
        return row
    if not site.differentiable:
        return replace(row, note="runs without gradients: what it does to the loss is seen in a run of its own only")
    return replace(row, **_effects(site.loss_change, projected(site, h), noise))


def sums(rows: Mapping[Compared, Row], group: Callable[[Compared], Row], noise: Noise, h: float) -> tuple[Row, ...]:
    """Rows over several sites, each under the row that `group` gives; effects are added up with their signs."""
    found: dict[Row, list[Compared]] = {}
    for site in rows:
        found.setdefault(group(site), []).append(site)
    return tuple(_sum(head, {site: rows[site] for site in sites}, noise, h) for head, sites in found.items())


def _sum(head: Row, rows: Mapping[Compared, Row], noise: Noise, h: float) -> Row:
    alone, accumulated = Difference(), Distance()
    for site in rows:
        alone.merge(site.alone)
        accumulated.merge(site.accumulated)
    head = replace(head, **_measures(alone, accumulated), calls=sum(row.calls for row in rows.values()))
    if not noise.batches:
        return head
    changes = [sum(scores) for scores in zip(*(site.loss_change for site in rows), strict=True)]
    along = [sum(scores) for scores in zip(*(projected(site, h) for site in rows), strict=True)]
    head = replace(head, **_effects(changes, along, noise))
    measured = [row for row in rows.values() if row.measured or row.phase]
    if not measured:
        return head
    worst = max(measured, key=lambda row: (bool(row.phase), row.gradient_error))
    keys = ("loss_change", "gradient_error", "gradient_bias", "measured", "phase", "nonfinite", "mended", "note")
    return replace(head, **{key: getattr(worst, key) for key in keys})


def _measures(alone: Difference, accumulated: Distance) -> dict:
    # A constant that a program takes from the dtype, as for masks, is that of FP32 where the op is computed alone: what
    # overflows there alone says nothing.
    overflows = bool(accumulated.nonfinite)
    return {
        "error": math.inf if overflows and alone.nonfinite else alone.relative,
        "ulp": alone.ulp,
        "bias": alone.bias,
        "spread": alone.spread,
        "accumulated": math.inf if overflows else accumulated.relative,
        "nonfinite": accumulated.nonfinite,
    }


def projected(site: Compared, h: float) -> list[float]:
    """v . e_b of one site, by batch."""
    return [(shifted - here) / h for here, shifted in zip(site.loss_change, site.shifted, strict=True)]


def _effects(changes: list[float], along: list[float], noise: Noise) -> dict:
    return {
        "loss_change": math.sqrt(mean_square(changes)),
        "gradient_error": noise.in_noise(mean_square(along)),
        "gradient_bias": noise.in_noise(biased_square(by_direction(along), len(along))),
    }


def mask_note(site: Compared) -> str:
    """What a value has to do with it that FP32 holds and the low dtype does not: that of a mask, most of the time."""
    for dtype, largest in _LARGEST.items():
        if name(dtype) in site.dtypes.split() and site.largest >= largest * (1 - 2**-9):
            return (
                f"FP32 has {site.largest:.4g} there, and {name(dtype)} ends at {largest:.4g}: if this is a mask, "
                "fill it with torch.finfo(x.dtype).min"
            )
    return ""
