"""A record as one HTML page."""

from __future__ import annotations

from dataclasses import asdict

from hmpx.insight.pages import filled
from hmpx.insight.recording.alike import alike
from hmpx.insight.recording.recorded import Recorded
from hmpx.insight.recording.table import NOTHING_CONVERTED, as_text, attention
from hmpx.insight.recording.words import short_places

_WIDTH = 110  # of the text that stands in the page for readers without scripts


def as_page(log: Recorded) -> str:
    """The page, complete."""
    notices = [
        (heading, [short_places(line) for line in lines], heading.endswith("as the lists ask"))
        for heading, lines in attention(log)
    ]
    shown = {
        **log.as_json(),
        "together": [asdict(site) for site in alike(log.sites)],
        "attention": notices,
        "nothing": NOTHING_CONVERTED,
    }
    return filled(str(__package__), "record", as_text(log, _WIDTH), shown)
