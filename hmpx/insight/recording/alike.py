"""Sites of equal blocks, taken together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hmpx.insight.recording.site import SHAPES, Site

_INDEX = re.compile(r"(?<![^. ])\d+(?=\.|\Z| )")  # of a layer, in the name of a module


def numberless(text: str) -> str:
    """The name of a module with a star for each number, which equal blocks have in common."""
    return _INDEX.sub("*", text)


def alike(sites: Iterable[Site]) -> list[Site]:
    """Sites of equal blocks as one: the same line and op, in modules whose names differ in their numbers only.

    Their sums stand in it, and `blocks.*.norm` for the module.
    """
    groups: dict[tuple, list[Site]] = {}
    for site in sites:
        names = tuple(numberless(text) for text in (site.module, site.unchosen))
        groups.setdefault((site.op, site.entry, site.where, site.rule, site.dtypes, *names), []).append(site)
    return [_together(group) for group in groups.values()]


def _together(group: list[Site]) -> Site:
    first = group[0]
    if len(group) == 1:
        return first
    summed = ("calls", "casts", "casts_avoided", "bytes_cast", "cast_seconds", "op_seconds")
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
        **{name: sum(getattr(site, name) for site in group) for name in summed},
    )


def _figures(group: list[Site]) -> dict[str, dict[str, float]]:
    """Of casts to FP8: the largest of all, and sums."""
    found: dict[str, dict[str, float]] = {}
    for role, figures in (each for site in group for each in site.fp8.items()):
        known = found.setdefault(role, dict.fromkeys(figures, 0.0))
        for name, figure in figures.items():
            known[name] = max(known[name], figure) if name == "largest" else known[name] + figure
    return found
