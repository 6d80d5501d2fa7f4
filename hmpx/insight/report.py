"""`Report`: what a call of insight has found, as text in a terminal, as one HTML page, and as JSON.

A report has some lines, and sections: `Lines` under a heading, tables (`Grid`), and pictures (`Bars`), which only the
page shows. In a table that is too wide for the terminal, cells are cut, and the least important columns are left out.

The page needs no network and no other file. It holds its sections as JSON, and the script in ``page.html`` draws them.
Names and paths are escaped in the JSON, so that none can end the element that it stands in, and the script adds them as
text, never as HTML. What is printed has no control characters, so that no name can command the terminal.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from html import escape
from importlib.resources import files
from typing import Any, ClassVar, Literal, TypeVar

import torch

from hmpx.base import process_state
from hmpx.base.files import write
from hmpx.ops.computing.kernels import capability
from hmpx.version import __version__

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_GAP = 2
_DTYPE = re.compile(r"\b(b?)float(\d+)")


def short_dtypes(text: str) -> str:
    """Shorten the dtypes in a text: "bf16" for "bfloat16", "fp32" for "float32"."""
    return _DTYPE.sub(lambda found: f"{'bf' if found[1] else 'fp'}{found[2]}", text).replace(" and ", "+")


def dtype_steps(*steps: Iterable[str]) -> str:
    """Join the dtypes of an op's arguments, of the op and of its result, each once: "float32 -> bfloat16"."""
    words = [" and ".join(dict.fromkeys(step)) for step in steps]
    return " -> ".join(word for i, word in enumerate(words) if word and (i == 0 or word != words[i - 1]))


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 99.9 else f"{1e3 * seconds:.0f}"


def size(count: float) -> str:
    """Format a number of bytes, in units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def amount(value: float, unit: str = "") -> str:
    """Format seconds ("s") in ms, and other units with a prefix."""
    if unit == "s":
        return f"{float(f'{1e3 * value:.2g}'):g} ms"  # 480 ms, and not 4.8e+02
    for prefix in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}".rstrip()
        value /= 1000
    return f"{value:.3g} T{unit}"


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return items by what `key` says of each, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for each in items:
        found.setdefault(key(each), []).append(each)
    return found


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def number(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: "1 call", "2 calls"."""
    return f"{count} {one if count == 1 else many or one + 's'}"


_ROWS, _LINES = 20, 8  # that a terminal shows of a table, and under a heading
_WIDTH = 110  # of the text in the page for readers without scripts
_ESCAPED = {ord(each): f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}
Kind = Literal["text", "words", "end", "dtypes", "number", "figure"]


@dataclass(frozen=True)
class Field:
    """A column of a table: its title, and the text that a row has in it.

    kind: "text"; "words", which the page breaks into lines; "end", which a terminal cuts at its beginning, as the end
    of a path tells most; "dtypes"; "number", which the page adds up over the rows; "figure", which it shows with two
    digits. value: what the page shows and sorts by instead of the text. page: whether only the page (True) or only a
    terminal (False) has the column; None: both.
    In a terminal: right: cells end at the right. least: the length to which cells may be cut; 0 where they may not.
    rank: the highest is left out first where the terminal is narrow, 0 never.
    """

    title: str
    text: Callable[[Any], str] = str
    kind: Kind = "text"
    value: Callable[[Any], float] | None = None
    page: bool | None = None
    right: bool = False
    least: int = 0
    rank: int = 0


def table(fields: Iterable[Field], rows: Sequence[Any], width: int) -> list[str]:
    """Return the lines of a table, its titles first, without the columns in which no row has anything.

    No line is longer than `width` if columns of rank 0 can be cut to it.

    Example:
        >>> fields = Field("op", lambda row: row[0]), Field("calls", lambda row: row[1], right=True)
        >>> print(*table(fields, [("linear", "3"), ("cat", "12")], 80), sep="\\n")
        op      calls
        linear      3
        cat        12
    """
    columns = {each: [each.title, *map(each.text, rows)] for each in fields}
    shown = [each for each, (_, *cells) in columns.items() if {*cells} - {"", "-"}]
    widths = {each: max(map(len, cells)) for each, cells in columns.items()}
    narrowest = {
        each: max(len(each.title), min(most, each.least)) if each.least else most for each, most in widths.items()
    }
    while sum(narrowest[each] + _GAP for each in shown) - _GAP > width:
        worst = max(shown, key=lambda each: each.rank)
        if not worst.rank:
            break
        shown.remove(worst)
    while sum(widths[each] + _GAP for each in shown) - _GAP > width:
        widest = max(shown, key=lambda each: widths[each] - narrowest[each])
        if widths[widest] <= narrowest[widest]:
            break
        widths[widest] -= 1
    lines = zip(*([_cell(text, widths[each], each) for text in columns[each]] for each in shown), strict=True)
    return [(" " * _GAP).join(line).rstrip() for line in lines]


def _cell(text: str, width: int, field: Field) -> str:
    if len(text) > width:
        text = "…" + text[len(text) - width + 1 :] if field.kind == "end" else text[: width - 1] + "…"
    return text.rjust(width) if field.right else text.ljust(width)


@dataclass(frozen=True)
class Grid:
    """A table, without the columns in which no row has anything.

    head: its heading in a terminal. page: its heading in the page, which leaves out a table without one.
    shown: the rows for a terminal; None: all. It shows the first of them, and `more` says what the rest are.
    notes: what a row of the page opens to; empty ones are left out. order: the column that the page sorts by,
    descending; "" leaves the order of `rows`.
    """

    fields: Sequence[Field]
    rows: Sequence[Any]
    head: str = ""
    shown: Sequence[Any] | None = None
    more: Callable[[Sequence[Any]], str] = lambda rows: number(len(rows), "more row")
    notes: Callable[[Any], Iterable[str]] = lambda row: ()
    page: str = ""
    order: str = ""

    def as_text(self, width: int) -> list[str]:
        rows = self.rows if self.shown is None else self.shown
        if not rows:
            return []
        lines = table((each for each in self.fields if not each.page), rows[:_ROWS], width)
        rest = [f"… and {self.more(rows[_ROWS:])}"] if rows[_ROWS:] else []
        return ["", *filter(None, [self.head]), *lines, *rest]

    def as_page(self) -> dict[str, Any] | None:
        if not (self.page and self.rows):
            return None
        fields = [each for each in self.fields if each.page is not False]
        cells = {each: plain([(each.value or each.text)(row) for row in self.rows]) for each in fields}
        kept = [each for each in fields if any(cell not in ("", "-", None) for cell in cells[each])]
        notes = [[*filter(None, self.notes(row))] for row in self.rows]
        rows = [[*row] for row in zip(*(cells[each] for each in kept), notes, strict=True)]
        order = next((i for i, each in enumerate(kept) if self.order and each.title == self.order), None)
        heads = [(each.title, each.kind) for each in kept]
        return {"kind": "table", "head": self.page, "columns": heads, "rows": rows, "order": order}


@dataclass(frozen=True)
class Bars:
    """A picture, of the page alone: a bar for each name, value and words.

    mark: a value that is marked, and `marked` says what begins there; the scale is logarithmic then. 0: none.
    unit: of the values, at the ticks of the axis.
    """

    head: str
    about: str
    rows: Sequence[tuple[str, float, str]]
    mark: float = 0.0
    marked: str = ""
    unit: str = ""

    def as_text(self, width: int) -> list[str]:
        return []

    def as_page(self) -> dict[str, Any] | None:
        return {"kind": "bars", **vars(self)} if self.rows else None


@dataclass(frozen=True)
class Lines:
    """Lines under a heading, marked if something is `wrong`. In the page, `names` open beneath the lines.

    closed: only the page has the lines, as a text that opens by its heading.
    """

    head: str
    lines: Sequence[str]
    wrong: bool = False
    names: Sequence[str] = ()
    closed: bool = False

    def as_text(self, width: int) -> list[str]:
        if self.closed or not self.lines:
            return []
        more = [f"  … and {len(self.lines) - _LINES} more"] if len(self.lines) > _LINES else []
        return ["", self.head, *(f"  {line}" for line in self.lines[:_LINES]), *more]

    def as_page(self) -> dict[str, Any] | None:
        lines = [*filter(None, self.lines)]
        if not lines:
            return None
        if self.closed:
            return {"kind": "text", "head": self.head, "text": "\n".join(lines)}
        tone = "warn" if self.wrong else ""
        return {"kind": "box", "head": self.head, "lines": lines, "tone": tone, "more": [*self.names]}


# What a report is of: the script, the recipe, the day, the versions and the device, for the head of its page


def about() -> dict[str, str]:
    """Return words by what they are about, the script first; without those that nobody knows."""
    found = {
        "script": process_state.run.get("script") or _program(),
        "recipe": process_state.run.get("recipe", ""),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "hmpx": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device(),
    }
    return {key: words for key, words in found.items() if words}


def about_files() -> dict[str, str]:
    """Return what is known of a report on files that two runs have left, on this machine or another."""
    return {key: words for key, words in about().items() if key in ("script", "date", "hmpx")}


def device() -> str:
    """Return the name of the GPU if this process uses one, and what the CPU has."""
    own = torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""
    return f"{own}; CPU {capability()}".removeprefix("; ")


def _program() -> str:
    """Return the script that Python runs, with its arguments; "" at a prompt."""
    own = sys.argv[0] if sys.argv else ""
    return shlex.join([os.path.basename(own), *sys.argv[1:]]) if os.path.isfile(own) else ""


def title(command: str, known: dict[str, str]) -> str:
    """Return the title of a page: "hmpx doctor: train.py --lr 0.1, bf16-sr"."""
    named = ", ".join(each for key in ("script", "recipe") if (each := known.get(key)) and each != "none")
    return f"hmpx {command}: {named}" if named else f"hmpx {command}"


class Report:
    """What a call of insight has found, a dataclass: `as_json` says all of it, `json` and `html` save it."""

    _schema: ClassVar[int] = 0  # of the JSON; it grows when a name changes its meaning or goes
    _labels: ClassVar[Sequence[str]] = ()  # of `_lines`: words that stand before a line, in a column of 9 characters

    def as_json(self) -> dict[str, Any]:
        """Return the attributes as objects of JSON, by their names; null for NaN."""
        found = plain({each.name: getattr(self, each.name) for each in fields(self)})  # type: ignore[arg-type]
        return {"schema": self._schema, **found} if self._schema else found

    @property
    def _title(self) -> tuple[str, str]:
        """The name of the command, and the heading of the page."""
        raise NotImplementedError

    def _lines(self) -> Iterable[str]:
        """Return what it says first."""
        raise NotImplementedError

    def _sections(self) -> Iterable[Grid | Lines | Bars]:
        raise NotImplementedError

    def _about(self) -> dict[str, str]:
        """Return what the head of the page says: of which script, under which recipe, made when and where."""
        return about()

    def _text(self, width: int) -> str:
        """Return what it prints, in lines of `width` characters where words and paths allow."""
        return "\n".join([*self._lines(), *(line for each in self._sections() for line in each.as_text(width))])

    def __str__(self) -> str:
        text = self._text(max(80, shutil.get_terminal_size((100, 24)).columns))
        return "".join(each for each in text if each.isprintable() or each == "\n")

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save `as_json()`, by the names of the attributes."""
        write(path, json.dumps(self.as_json(), indent=1) + "\n")

    def html(self, path: str | os.PathLike[str]) -> None:
        """Save as one HTML page that needs no network and no other file."""
        write(path, self._page())

    def _page(self) -> str:
        (name, heading), known = self._title, self._about()
        sections = [*filter(None, (each.as_page() for each in self._sections()))]
        sections.sort(key=lambda each: each["kind"] != "box")  # what calls for attention stands first
        head = {"title": heading, "about": [*known.items()], "lines": [*self._lines()], "labels": [*self._labels]}
        shown = json.dumps(plain({**head, "sections": sections}), allow_nan=False).translate(_ESCAPED)
        values = {"TITLE": escape(title(name, known)), "TEXT": escape(self._text(_WIDTH)), "SHOWN": shown}
        first, *rest = files(str(__package__)).joinpath("page.html").read_text(encoding="utf-8").split("{{")
        return first + "".join(values[part.partition("}}")[0]] + part.partition("}}")[2] for part in rest)


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: dataclasses as objects, tuples as lists, null for NaN, and "inf"."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else "inf" if value > 0 else "-inf"
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
