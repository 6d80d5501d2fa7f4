"""`isVerbose=True`: each distinct decision once through `logging`, and how often it was taken at the end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from collections import Counter
from typing import Any

import torch

from hmpx import process_state
from hmpx.casts.callers import users_line
from hmpx.casts.ops import Entry
from hmpx.casts.policy import Rule
from hmpx.casts.wrappers import Observer
from hmpx.changes import Changes, Flag

logger = logging.getLogger("hmpx")
_LEVEL = Flag("the level of the logger hmpx", lambda: logger.level, logger.setLevel)


class _Shown(logging.StreamHandler):
    """Writes to standard error as it is now, after all that the program has printed so far.

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
    """Collects the decisions of one conversion.

    A user who asked for it sees it: where no handler would show INFO records of the logger "hmpx", one that writes to
    standard error is attached while it is open. All that hmpx logs meanwhile goes through it, warnings too.
    """

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()

    def function(self, name: str, rule: Rule, given: Any, seen: Any, result: Any) -> None:
        """Record a call of a user's own function."""
        self._record(f"{name}, {rule}: {_dtypes(given)} -> {_dtypes(seen)} -> {_dtypes((result,))}")

    def _record(self, decision: str) -> None:
        line = f"{decision} at {users_line(sys._getframe(2))}"
        with self._lock:
            self._seen[line] += 1
            first = self._seen[line] == 1
        if first:
            logger.info("hmpx: %s", line)

    def observer(self, op: str, entry: Entry, rule: Rule) -> Observer:
        head = f"{op} as {entry.label}, {rule}"

        def observe(given: tuple, seen: tuple, result: Any) -> None:
            self._record(f"{head}: {_dtypes(given)} -> {_dtypes(seen)} -> {_dtypes((result,))}")

        return observe

    def apply(self, changes: Changes) -> None:
        """Record from here on, calls of users' own functions as well.

        Undone, or when the program ends before, it logs how often each decision was taken.
        """
        if not logger.isEnabledFor(logging.INFO):
            changes.put(_LEVEL, logging.INFO)
        if not logger.hasHandlers():
            handler = _Shown()
            handler.setFormatter(logging.Formatter("%(message)s"))
            logger.addHandler(handler)
            changes.callback(logger.removeHandler, handler)
        changes.callback(self._close)
        atexit.register(self._close)
        process_state.log = self

    def _close(self) -> None:
        process_state.log = None
        atexit.unregister(self._close)
        for line, count in self._seen.most_common():
            logger.info("hmpx: %6d times %s", count, line)


class Announcement:
    """What `convert` says when it begins, for those who look at INFO records. A part, which nothing takes back."""

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
