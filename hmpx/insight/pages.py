"""HTML pages that need nothing else: no network, no other file.

What they show stands in them as JSON, which a script in the page draws from. Names and paths are only ever text there:
they are escaped in the JSON, so that none can end the element that it stands in; the script never reads them as HTML.
"""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

_MAIN = '<main id="page"></main>'
_ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


def filled(package: str, title: str, text: str, shown: dict[str, Any], body: str = _MAIN) -> str:
    """A page: ``page.html`` of this package with the ``page.css`` and ``page.js`` of another one in it.

    Args:
        package: of which view it is.
        title: the name of the view.
        text: what stands in the page for readers without scripts.
        shown: what its script draws, as `found`.
        body: HTML that the script draws into.
    """
    template = _read(str(__package__), "page.html")
    values = {
        "TITLE": title,
        "STYLE": _read(str(__package__), "style.css"),
        "OWN_STYLE": _read(package, "page.css"),
        "TEXT": html.escape(text),
        "BODY": body,
        "SCRIPT": _read(package, "page.js"),
        "RECORD": json.dumps(shown, ensure_ascii=True).translate(_ESCAPED),
    }
    first, *rest = template.split("{{")
    for part in rest:
        name, _, after = part.partition("}}")
        first += values[name] + after
    return first


def _read(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text(encoding="utf-8")
