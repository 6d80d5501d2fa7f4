"""`Report`, and its page: one HTML file of sections that needs no network and no other file.

A page holds its sections as JSON, and the script in ``page.html`` draws them: boxes of lines, texts that open, bars,
and tables that sort and filter. Names and paths are escaped in the JSON, so that none can end the element that it
stands in, and the script adds them as text, never as HTML.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

_ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}
Section = dict[str, Any]


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
        """Save as one HTML page that needs no network and no other file."""
        Path(path).write_text(self._page(), encoding="utf-8")


def page(name: str, title: str, lines: Iterable[str], sections: Iterable[Section], text: str) -> str:
    """Return a page.

    Args:
        name: of the view, as in its command.
        title: the heading.
        lines: what it says first.
        sections: made by `box`, `closed`, `bars` and `grid`, in their order.
        text: for readers without scripts.
    """
    shown = json.dumps(plain({"title": title, "lines": [*lines], "sections": [*sections]}), allow_nan=False)
    values = {"NAME": name, "TEXT": html.escape(text), "SHOWN": shown.translate(_ESCAPED)}
    first, *rest = files(str(__package__)).joinpath("page.html").read_text(encoding="utf-8").split("{{")
    return first + "".join(values[part.partition("}}")[0]] + part.partition("}}")[2] for part in rest)


def box(head: str, lines: Iterable[str], wrong: bool, names: Iterable[str] = ()) -> Section:
    """Return a box of lines with a heading, and of `names` that open; marked if something is `wrong`."""
    shown = [*filter(None, lines)]
    return {"kind": "box", "head": head, "lines": shown, "tone": "warn" if wrong else "", "more": [*names]}


def closed(head: str, text: str) -> Section:
    """Return a text that opens by its heading."""
    return {"kind": "text", "head": head, "text": text}


def bars(head: str, about: str, rows: Iterable[tuple[str, float, str]], mark: float = 0.0) -> Section:
    """Return a picture: a bar for each name, value and words. A mark, at a value, makes the scale logarithmic."""
    return {"kind": "bars", "head": head, "about": about, "rows": [*rows], "mark": mark}


def grid(head: str, columns: Mapping[str, str], rows: Iterable[Sequence[Any]], order: str = "") -> Section:
    """Return a table, without the columns in which no row has a value.

    Args:
        head: the heading.
        columns: by title their kind: "text"; "end", of which the end tells most; "dtypes"; "number", which is added up
            over the rows; "figure", a number with two digits.
        rows: a value for each column, and a list of notes that the row opens to, of which empty ones are left out.
        order: the column that it is sorted by, descending; "" leaves the order of `rows`.
    """
    table = plain([*rows])
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", None) for row in table)]
    shown = [item for i, item in enumerate(columns.items()) if i in kept]
    by = [title for title, _ in shown].index(order) if order else None
    cells = [[*(row[i] for i in kept), [*filter(None, row[-1])]] for row in table]
    return {"kind": "table", "head": head, "columns": shown, "rows": cells, "order": by}


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: dataclasses as objects, tuples as lists, null for NaN, and "inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
