"""A comparison as one HTML page."""

from __future__ import annotations

from typing import Any

from hmpx.insight.comparing.row import BROKEN, Found
from hmpx.insight.comparing.words import as_text, verdict
from hmpx.insight.pages import filled

_WIDTH = 110  # of the text that stands in the page for readers without scripts


def as_page(found: Found, values: dict[str, Any]) -> str:
    """The page, complete; `values` is the comparison as objects of JSON."""
    shown = {**values, "verdict": list(verdict(found)), "broken": BROKEN, "is_broken": found.is_broken}
    return filled(str(__package__), "compare", as_text(found, _WIDTH), shown)
