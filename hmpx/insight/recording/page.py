"""A record as one HTML page that needs nothing else: no network, no other file.

The record stands in it as JSON, which a script in the page draws from. Names and paths are only ever text there: they
are escaped in the JSON, so that none can end the element that it stands in, and the script never reads them as HTML.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib.resources import files

from hmpx.insight.recording.alike import alike
from hmpx.insight.recording.recorded import Recorded
from hmpx.insight.recording.table import NOTHING_CONVERTED, as_text, attention
from hmpx.insight.recording.words import short_places

_WIDTH = 110  # of the text that stands in the page for readers without scripts
_ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


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
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    before, _, rest = template.partition("{{TEXT}}")
    between, _, after = rest.partition("{{RECORD}}")
    record = json.dumps(shown, ensure_ascii=True).translate(_ESCAPED)
    return "".join([before, html.escape(as_text(log, _WIDTH)), between, record, after])
