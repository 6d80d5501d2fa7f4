"""Text tables that fit a terminal: wide cells are cut, and the least important columns are left out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = 2
_LAYER = re.compile(r"(?<![^.])(\d+|\*)(?=\.)")  # in the name of a module


@dataclass(frozen=True)
class Column:
    """One column of a table.

    least: what its cells may be cut to, in characters; 0 where they may not. from_left: where they are cut, as the end
    of a path tells more than its beginning. rank: the highest is left out first where a terminal is narrow, 0 never.
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
    """The width of the terminal behind standard output, at least 80; 100 if there is none."""
    return max(80, shutil.get_terminal_size((100, 24)).columns)


def table(columns: Sequence[Column], width: int) -> list[str]:
    """The lines of a table, its titles first, none longer than `width` if the columns of rank 0 can be as narrow.

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
        text = _from_left(text, width) if column.from_left else text[: width - 1] + "…"
    return text.rjust(width) if column.right else text.ljust(width)


def _from_left(text: str, width: int) -> str:
    """The end of a dotted name or a path, and before it the number of the layer, if there is one and room for it."""
    end = text[len(text) - width + 1 :]
    numbers = list(_LAYER.finditer(text, 0, len(text) - width + 2))
    if numbers:
        head = f"…{numbers[-1][0]}…"
        if len(head) + 3 <= width:
            return head + text[len(text) - width + len(head) :]
    return f"…{end}"
