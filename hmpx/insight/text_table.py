"""Text for a terminal: tables that fit it, and figures, dtypes and places in few characters.

In a table that is too wide, cells are cut, and the least important columns are left out.
"""

from __future__ import annotations

import os
import re
import shutil
import site
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

# The folders of packages: of this interpreter, of its user, and the one that torch is in.
PACKAGES = tuple(
    os.path.join(folder, "")
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(torch.__file__)),
    )
)

_GAP = 2
_DTYPE = re.compile(r"\b(b?)float(\d+)")


@dataclass(frozen=True)
class Column:
    """One column of a table.

    least: the length to which its cells may be cut; 0 where they may not. from_left: whether they are cut at the
    beginning, as the end of a path tells more. rank: the highest is left out first where a terminal is narrow, 0 never.
    """

    title: str
    cells: Sequence[str]
    right: bool = False
    least: int = 0
    from_left: bool = False
    rank: int = 0

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.cells)))

    @property
    def narrowest(self) -> int:
        return max(len(self.title), min(self.width, self.least)) if self.least else self.width


def terminal_width() -> int:
    """Return the width of the terminal behind standard output, at least 80; 100 if there is none."""
    return max(80, shutil.get_terminal_size((100, 24)).columns)


def table(columns: Sequence[Column], width: int) -> list[str]:
    """Return the lines of a table, its titles first; none is longer than `width` if columns of rank 0 can be cut to it.

    Example:
        >>> print(*table([Column("op", ["linear", "cat"]), Column("calls", ["3", "12"], right=True)], 80), sep="\\n")
        op      calls
        linear      3
        cat        12
    """
    shown = list(columns)
    while sum(column.narrowest + _GAP for column in shown) - _GAP > width:
        worst = max(shown, key=lambda column: column.rank)
        if not worst.rank:
            break
        shown.remove(worst)
    widths = [column.width for column in shown]
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        spare = [now - column.narrowest for now, column in zip(widths, shown, strict=True)]
        widest = max(range(len(shown)), key=spare.__getitem__)
        if spare[widest] <= 0:
            break
        widths[widest] -= 1
    lines = []
    for row in [[column.title for column in shown], *zip(*(column.cells for column in shown), strict=True)]:
        cells = (_cell(text, each, column) for text, each, column in zip(row, widths, shown, strict=True))
        lines.append((" " * _GAP).join(cells).rstrip())
    return lines


def _cell(text: str, width: int, column: Column) -> str:
    if len(text) > width:
        text = "…" + text[len(text) - width + 1 :] if column.from_left else text[: width - 1] + "…"
    return text.rjust(width) if column.right else text.ljust(width)


def short_dtypes(text: str) -> str:
    """Shorten the dtypes in a text: "bf16" for "bfloat16", "fp32" for "float32"."""
    return _DTYPE.sub(lambda found: f"{'bf' if found[1] else 'fp'}{found[2]}", text).replace(" and ", "+")


def dtype_steps(*steps: Iterable[str]) -> str:
    """Join the dtypes of an op's arguments, of the op and of its result, each once: "float32 -> bfloat16"."""
    words = [" and ".join(dict.fromkeys(step)) for step in steps]
    return " -> ".join(word for i, word in enumerate(words) if word and (i == 0 or word != words[i - 1]))


def short_place(where: str) -> str:
    """Shorten file:line to the path from the folder of the program or of its packages, or else to the file's name."""
    path, _, line = where.rpartition(":")
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.basename(path)
    inside = next((path.removeprefix(folder) for folder in PACKAGES if path.startswith(folder)), inside)
    return f"{inside}:{line}" if path else where


def short_places(text: str) -> str:
    """Shorten each path in a sentence as `short_place` does."""
    text = text.replace(os.path.join(os.getcwd(), ""), "")  # which may have a space in it
    return re.sub(r"(?<![\w.])/[^\s:]+:\d+", lambda found: short_place(found[0]), text)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 99.9 else f"{1e3 * seconds:.0f}"


def size(count: float) -> str:
    """Format a number of bytes, in units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def number(count: int, one: str, many: str = "") -> str:
    """Format a count with its noun: "1 call", "2 calls"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
