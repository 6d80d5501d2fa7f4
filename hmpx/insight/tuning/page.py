"""A tuning as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hmpx.insight.pages import filled
from hmpx.insight.tuning.choice import Choice, amount, percent

_BODY = """<main>
<div id="head"></div>
<h2>Error against cost</h2>
<p class="faint">The line: the ranking, name by name, with the errors of single names added up. \
The marks: measured on held-out batches.</p>
{plot}
<div id="rest"></div>
</main>"""


def as_page(text: str, verdict: Sequence[str], choices: Sequence[Choice], plot: str, values: dict[str, Any]) -> str:
    """The page, complete; `values` is the tuning as objects of JSON, `plot` its SVG."""
    rows = [{**row, "shown": _shown(choice)} for row, choice in zip(values["choices"], choices, strict=True)]
    shown = {**values, "verdict": list(verdict), "choices": rows}
    return filled(str(__package__), "tune", text, shown, _BODY.format(plot=plot))


def _shown(choice: Choice) -> list[str]:
    gain = f"{'-' if choice.gain < 0 else ''}{amount(abs(choice.gain), choice.unit)}" if choice.gain else ""
    return [
        f"{choice.gradient_error:.1e}",
        f"{choice.loss_change:.1e}",
        percent(choice.budget) if choice.budget < math.inf else "",
        gain,
    ]
