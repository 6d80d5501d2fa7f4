"""Draws error against cost as SVG: the lists that were found, and known ones. `Mark`: lists as a point of it."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hmpx.insight.tuning.choices import amount, percent

_WIDTH, _HEIGHT = 800, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 546, 34, 364  # the edges of the frame
_DECADES = 6  # at most, below the largest error
_LINE = 17  # between two labels
_COST = {"s": "forward and backward of a step", "FLOP": "matrix products in FP32", "B": "saved for the backward pass"}
_STYLE = """
svg { font: 13px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
svg { --paper: #ffffff; --ink: #1f2328; --faint: #656d76; --edge: #d1d9e0; --accent: #0969da; --warn: #bc4c00; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #0d1117; --ink: #e6edf3; --faint: #9198a1; --edge: #3d444d; --accent: #4493f8; --warn: #f0883e; }
}
text { fill: var(--ink); } .faint { fill: var(--faint); } .grid, .leader { stroke: var(--edge); }
.known { fill: var(--warn); } .tuned { fill: var(--accent); } .bound { stroke: var(--warn); stroke-dasharray: 5 4; }
"""


@dataclass(frozen=True)
class Mark:
    """Lists as a point of a plot.

    Attributes:
        name: of the lists. cost: in the unit of the objective. gradient_error: on held-out batches, in units of the
            noise between batches. share: of the FLOPs of matrix products, what is in BF16. raised: what the program
            raises under these lists; its error is infinite then, and its cost that of the ops that they name.

    Example:
        >>> hmpx.Mark("all in FP32", cost=1.9e-3, gradient_error=0.0, share=0.0).name
        'all in FP32'
    """

    name: str
    cost: float
    gradient_error: float
    share: float
    raised: str = ""

    def line(self, unit: str, low: str) -> str:
        """Return it as a line of a table. low: the low precision, in words."""
        if self.raised:
            return f"{self.name:24} does not run: {self.raised}"
        share = f"{percent(self.share)} in {low}"
        return f"{self.name:24} error {self.gradient_error:<8.2g} {amount(self.cost, unit):>10}  {share}"


def as_svg(marks: Sequence[Mark], tolerance: float, unit: str, low: str) -> str:
    """Draw the plot, complete; it follows the reader's light or dark colours. low: the low precision."""
    errors = [error for error in [*(mark.gradient_error for mark in marks), tolerance] if 0 < error < math.inf]
    largest = math.ceil(math.log10(max(errors, default=1.0)))
    least = max(min(math.floor(math.log10(min(errors, default=0.1))), largest - 1), largest - _DECADES)
    most = max(mark.cost for mark in marks) or 1.0

    def across(cost: float) -> float:
        return _LEFT + cost / most * 0.96 * (_RIGHT - _LEFT)

    def up(error: float) -> float:
        """Return the height on a logarithmic scale; no error is at the foot, an infinite one at the top."""
        if error <= 0:
            return _BOTTOM
        power = math.log10(error) if error < math.inf else math.inf
        share = (min(max(power, least), largest + 0.5) - least + 0.5) / (largest - least + 1)
        return _BOTTOM - share * (_BOTTOM - _TOP)

    drawn = [f'<rect width="{_WIDTH}" height="{_HEIGHT}" style="fill: var(--paper)"/>']
    for power in (-math.inf, *range(least, largest + 1)):
        y = up(10.0**power)
        drawn += [_line("grid", _LEFT, y, _RIGHT, y), _text(_LEFT - 8, y + 4, f"{10.0**power:g}", "faint", "end")]
    drawn.append(_text(_LEFT - 58, 20, "gradient error, in units of the noise between batches", "faint"))
    for share in (0.0, 0.5, 1.0):
        drawn.append(_text(across(share * most), _BOTTOM + 20, amount(share * most, unit), "faint", "middle"))
    drawn.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, _COST[unit], "faint", "middle"))
    if tolerance:
        drawn.append(_line("bound", _LEFT, up(tolerance), _RIGHT, up(tolerance)))
        drawn.append(_text(_LEFT + 6, up(tolerance) - 5, f"tolerance {tolerance:g}", "faint"))
    below = _TOP - 2.0 * _LINE
    for mark in sorted(marks, key=lambda mark: up(mark.gradient_error)):  # labels in a column beside the frame
        x, y = across(mark.cost), up(mark.gradient_error)
        below = max(below + 2 * _LINE + 4, y - _LINE / 2)
        kind, radius = ("tuned", 6.0) if mark.name == "tuned" else ("known", 4.5)
        error = f"error {mark.gradient_error:.2g}" if mark.gradient_error < math.inf else "not finite"
        said = f"{'does not run' if mark.raised else error}, {amount(mark.cost, unit)}, {percent(mark.share)} in {low}"
        drawn += [
            _line("leader", x, y, _RIGHT + 10, below),
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>',
            _text(_RIGHT + 14, below + 4, mark.name, kind),
            _text(_RIGHT + 14, below + 4 + _LINE, said, "faint", size=11),
        ]
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{_STYLE}</style>{"".join(drawn)}</svg>\n'


def _text(x: float, y: float, text: str, classes: str, anchor: str = "start", size: int = 13) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text class="{classes}" {place}>{html.escape(text)}</text>'


def _line(classes: str, x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<line class="{classes}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'
