"""`isVerbose=True`: each distinct decision once through `logging`, and how often it was taken at the end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import types
from collections import Counter
from typing import Any

import torch

from hmpx.changes import Changes, Flag
from hmpx.ops.wrapping.callers import users_line
from hmpx.ops.wrapping.observing import Point, Run, Seen

logger = logging.getLogger("hmpx")
_LEVEL = Flag("the level of the logger hmpx", lambda: logger.level, logger.setLevel)


class _Shown(logging.StreamHandler):
    """Writes to the current standard error, after all output of the program so far.

    So where both streams go to one file or pipe, a decision stands between the lines that were printed before and after
    it, and not before all of them.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            sys.stdout.flush()
        if sys.stderr is not None:
            self.setStream(sys.stderr)
            super().emit(record)


class VerboseLog:
    """Observes the ops that have a rule, and collects the decisions of one conversion.

    A user who asked for it sees it: where no handler would show INFO records of the logger "hmpx", one that writes to
    standard error is attached while it is open. All that hmpx logs meanwhile goes through it, warnings too.
    """

    everything = False

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def leaves(self, caller: types.CodeType) -> bool:
        return False

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        seen = run(*args, **kwargs)
        if seen.casting and point.rule is not None:
            dtypes = [_dtypes(values) for values in ((args, kwargs), (seen.args, seen.kwargs), (seen.result,))]
            head = point.op if point.label == point.op else f"{point.op} as {point.label}"
            self._record(f"{head}, {point.rule}: {' -> '.join(dtypes)} at {users_line(frame)}")
        return seen

    def _record(self, line: str) -> None:
        with self._lock:
            self._seen[line] += 1
            first = self._seen[line] == 1
        if first:
            logger.info("hmpx: %s", line)

    def apply(self, changes: Changes) -> None:
        """Show the log from here on. When undone, or at the program's end, log the count of each decision."""
        if not logger.isEnabledFor(logging.INFO):
            changes.put(_LEVEL, logging.INFO)
        if not logger.hasHandlers():
            handler = _Shown()
            handler.setFormatter(logging.Formatter("%(message)s"))
            logger.addHandler(handler)
            changes.callback(logger.removeHandler, handler)
        changes.callback(self._close)
        atexit.register(self._close)

    def _close(self) -> None:
        atexit.unregister(self._close)
        for line, count in self._seen.most_common():
            logger.info("hmpx: %6d times %s", count, line)


class Announcement:
    """A part that logs at INFO when `convert` begins; there is nothing to undo."""

    def __init__(self, *lines: str) -> None:
        self._lines = lines

    def apply(self, changes: Changes) -> None:
        for line in self._lines:
            logger.info(line)


def _dtypes(values: Any) -> str:
    found: list[str] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(str(value.dtype).removeprefix("torch."))
        elif isinstance(value, list | tuple | dict):
            inside = _dtypes(value.values() if isinstance(value, dict) else value)
            found += [inside] if inside else []
    return ", ".join(found)
