"""Error against cost, as SVG: the ranking name by name, the lists that were found, and known ones."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence

from hmpx.insight.tuning.choice import amount, percent
from hmpx.insight.tuning.mark import Mark

_WIDTH, _HEIGHT = 800, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 254, 34, 56  # of the frame
_DECADES = 6  # at most, below the largest error
_LINE = 17  # between two labels
_COST = {"s": "forward and backward of a step", "FLOP": "matrix products in FP32", "B": "saved for the backward pass"}
_STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
svg { --paper: #ffffff; --ink: #1f2328; --faint: #656d76; --edge: #d1d9e0; --accent: #0969da; --warn: #bc4c00; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --faint: #9198a1; --edge: #3d444d; --accent: #4493f8; --warn: #f0883e; }
}
text { fill: var(--ink); } .faint { fill: var(--faint); } .grid { stroke: var(--edge); }
.curve { fill: none; stroke: var(--faint); stroke-width: 1.5; } .dot { fill: var(--faint); }
.known { fill: var(--warn); } .tuned { fill: var(--accent); } .leader { stroke: var(--edge); }
.bound { stroke: var(--warn); stroke-dasharray: 5 4; }
"""


def as_svg(marks: Sequence[Mark], curve: Sequence[Mark], tolerance: float, unit: str) -> str:
    """The plot, complete; it follows the reader's light or dark colours."""
    points = [*marks, *curve]
    across, up = _across(points), _up(points, tolerance)
    within = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" style="fill: var(--paper)"/>', *_grid(points, up, unit)]
    if tolerance:
        y = up(tolerance)
        within.append(_line("bound", _LEFT, y, _WIDTH - _RIGHT, y))
        within.append(_text(_LEFT + 6, y - 5, f"tolerance {tolerance:g}", "faint"))
    way = sorted(curve, key=lambda mark: mark.cost)
    places = " ".join(f"{across(mark.cost):.1f},{up(mark.gradient_error):.1f}" for mark in way)
    within.append(f'<polyline class="curve" points="{places}"/>')
    within += [_dot("dot", across(mark.cost), up(mark.gradient_error), 2.5) for mark in way]
    within += _labelled(marks, across, up, unit)
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{_STYLE}</style>{"".join(within)}</svg>\n'


def _across(points: Iterable[Mark]) -> Callable[[float], float]:
    largest = max((mark.cost for mark in points), default=0.0) or 1.0
    return lambda cost: _LEFT + cost / largest * 0.96 * (_WIDTH - _RIGHT - _LEFT)


def _decades(points: Iterable[Mark], tolerance: float) -> tuple[int, int]:
    errors = [mark.gradient_error for mark in points] + [tolerance]
    shown = [error for error in errors if 0 < error < math.inf]
    largest = math.ceil(math.log10(max(shown, default=1.0)))
    least = math.floor(math.log10(min(shown, default=0.1)))
    return max(min(least, largest - 1), largest - _DECADES), largest


def _up(points: Sequence[Mark], tolerance: float) -> Callable[[float], float]:
    """On a logarithmic scale; no error is at the foot, and what is not finite at the top."""
    least, largest = _decades(points, tolerance)

    def up(error: float) -> float:
        if error <= 0:
            return _HEIGHT - _BOTTOM
        power = math.log10(error) if error < math.inf else largest + 1
        share = (min(max(power, least), largest + 0.5) - least + 0.5) / (largest - least + 1)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    return up


def _grid(points: Sequence[Mark], up: Callable[[float], float], unit: str) -> Iterable[str]:
    least, largest = _decades(points, 0.0)
    for power in range(least, largest + 1):
        y = up(10.0**power)
        yield _line("grid", _LEFT, y, _WIDTH - _RIGHT, y)
        yield _text(_LEFT - 8, y + 4, f"{10.0**power:g}", "faint", "end")
    foot = _HEIGHT - _BOTTOM
    yield _line("grid", _LEFT, foot, _WIDTH - _RIGHT, foot)
    yield _text(_LEFT - 8, foot + 4, "0", "faint", "end")
    yield _text(_LEFT - 58, 20, "gradient error, in units of the noise between batches", "faint")
    across = _across(points)
    largest_cost = max((mark.cost for mark in points), default=0.0)
    for share in (0.0, 0.5, 1.0):
        yield _text(across(share * largest_cost), foot + 20, amount(share * largest_cost, unit), "faint", "middle")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, foot + 42, _COST[unit], "faint", "middle")


def _labelled(
    marks: Sequence[Mark], across: Callable[[float], float], up: Callable[[float], float], unit: str
) -> Iterable[str]:
    """Marks, with their labels in a column beside the frame, so that none covers another."""
    below = _TOP - 2.0 * _LINE
    for mark in sorted(marks, key=lambda mark: up(mark.gradient_error)):
        x, y = across(mark.cost), up(mark.gradient_error)
        below = max(below + 2 * _LINE + 4, y - _LINE / 2)
        kind = "tuned" if mark.name == "tuned" else "known"
        yield _line("leader", x, y, _WIDTH - _RIGHT + 10, below)
        yield _dot(kind, x, y, 6 if kind == "tuned" else 4.5)
        yield _text(_WIDTH - _RIGHT + 14, below + 4, mark.name, kind)
        error = f"error {mark.gradient_error:.1e}" if mark.gradient_error < math.inf else "not finite"
        error = "does not run" if mark.raised else error
        said = f"{error}, {amount(mark.cost, unit)}, {percent(mark.share)} in BF16"
        yield _text(_WIDTH - _RIGHT + 14, below + 4 + _LINE, said, "faint", size=11)


def _text(x: float, y: float, text: str, classes: str, anchor: str = "start", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text class="{classes}" {place}>{html.escape(text)}</text>'


def _line(classes: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="{classes}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _dot(classes: str, x: float, y: float, radius: float) -> str:
    return f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
