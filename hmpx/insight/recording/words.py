"""Figures, dtypes and places of a record, in the few characters that a table has for them."""

from __future__ import annotations

import os
import re
from typing import Any

_DTYPE = re.compile(r"\b(b?)float(\d+)")


def short_dtypes(text: str) -> str:
    """ "bf16" for "bfloat16", "fp32" for "float32"."""
    return _DTYPE.sub(lambda found: f"{'bf' if found[1] else 'fp'}{found[2]}", text).replace(" and ", "+")


def short_place(where: str) -> str:
    """A line as people write it: by the path from the folder that the program runs in, or else by the file's name."""
    path, _, line = where.rpartition(":")
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.basename(path)
    return f"{inside}:{line}" if path else where


def short_places(text: str) -> str:
    """A sentence with each path in it as `short_place` has it."""
    return re.sub(r"(?<![\w.])/[^\s:]+:\d+", lambda found: short_place(found[0]), text)


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 99.9 else f"{1e3 * seconds:.0f}"


def size(count: float) -> str:
    """A number of bytes, in units of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def at(site: Any) -> str:
    """A site's line, op and module."""
    return f"{site.where}: {site.op}{f' in {site.module}' if site.module else ''}"


def times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def number(count: int, one: str, many: str = "") -> str:
    """ "1 call", "2 calls"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
