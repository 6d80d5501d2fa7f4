"""`Report`, and HTML pages that need nothing else: no network, no other file.

A page holds its values as JSON, and a script draws them. Names and paths are escaped in the JSON, so that none can end
the element that it stands in, and the script adds them as text, never as HTML.
"""

from __future__ import annotations

import html
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

_MAIN = '<main id="page"></main>'
_ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}


class Report:
    """What a call of insight has found: `as_json` says all of it, `json` and `html` save it."""

    def as_json(self) -> dict[str, Any]:
        """Return all of it as objects of JSON."""
        raise NotImplementedError

    def _page(self) -> str:
        raise NotImplementedError

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save `as_json()`, by the names of the attributes."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Save as one HTML page that holds everything, and needs no network and no other file."""
        Path(path).write_text(self._page(), encoding="utf-8")


def filled(package: str, title: str, text: str, shown: dict[str, Any], body: str = _MAIN) -> str:
    """Return a page: ``page.html`` of this package with the ``page.css`` and ``page.js`` of another one in it.

    Args:
        package: the package of the view.
        title: the name of the view.
        text: the text for readers without scripts.
        shown: the values that the script draws; it knows them as `found`.
        body: the HTML that the script draws into.
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
