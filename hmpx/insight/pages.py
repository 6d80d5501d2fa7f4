"""HTML pages that need nothing else: no network, no other file.

What they show stands in them as JSON, which a script in the page draws from. Names and paths are only ever text there:
they are escaped in the JSON, so that none can end the element that it stands in; the script never reads them as HTML.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

_ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def filled(package: str, text: str, shown: dict[str, Any], **pieces: str) -> str:
    """The page ``page.html`` of a package.

    Args:
        text: what stands in the page for readers without scripts.
        shown: what its script draws.
        pieces: HTML for other places of the template, by their names.
    """
    template = files(package).joinpath("page.html").read_text(encoding="utf-8")
    values = {
        "STYLE": files(__package__).joinpath("style.css").read_text(encoding="utf-8"),
        "TEXT": html.escape(text),
        **pieces,
        "RECORD": json.dumps(shown, ensure_ascii=True).translate(_ESCAPED),
    }
    first, *rest = template.split("{{")
    for part in rest:
        name, _, after = part.partition("}}")
        first += values[name] + after
    return first
