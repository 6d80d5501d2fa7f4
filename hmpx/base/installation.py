"""`convert` and `activate` share this: one of each kind is in force at a time, and leaving a ``with`` restores the one
that it replaced.

A second call replaces the first. A ``with`` around the second takes it away at its end and puts the first in force
again, unless that has ended meanwhile. `end_all` ends everything: no ``with`` that is still open gives anything back.
"""

from __future__ import annotations

import abc
from typing import TypeVar

from hmpx.base.changes import Changes
from hmpx.base.process_state import installed, lock
from hmpx.errors import HmpxError

_kinds: list[type[Installation]] = []
Self = TypeVar("Self", bound="Installation")


class Installation(abc.ABC):
    """A handle; at most one of each class is in force. Subclasses implement `_change`."""

    def __init_subclass__(cls) -> None:
        _kinds.append(cls)

    def __init__(self) -> None:
        self._before: Installation | None = None  # what this one replaced
        self._entered = self._ended = False
        self._changes = Changes()

    @abc.abstractmethod
    def _change(self, changes: Changes) -> None:
        """Make every change that puts this handle in force."""

    def _apply(self) -> None:
        """Put this handle in force. If that fails, nothing has changed."""
        try:
            self._change(self._changes)
        except BaseException:
            self._changes.close()
            raise

    def _install(self) -> None:
        """Replace the handle in force by this one. If that fails, the old one is in force again."""
        kind = type(self)
        with lock:
            before = current(kind)
            _take_away(kind)
            try:
                self._apply()
            except BaseException:
                _give(kind, before)
                raise
            installed[kind], self._before = self, before
            if before is not None and not before._entered:
                before._before = None  # it was replaced for good, unless this one turns out to stand in a `with`

    @property
    def active(self) -> bool:
        """Whether this handle is in force now."""
        return current(type(self)) is self

    def restore(self) -> None:
        """End this handle; nothing happens if another one is in force."""
        with lock:
            self._ended = True
            if self.active:
                _take_away(type(self))
                if self._entered:
                    _give(type(self), self._before)

    def __enter__(self: Self) -> Self:
        with lock:
            if not self.active:
                raise HmpxError(f"{self!r} is not in force any more and cannot be entered: make a new one")
            self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def current(kind: type[Self]) -> Self | None:
    """The handle of this class that is in force."""
    return installed.get(kind)


def _take_away(kind: type[Installation]) -> None:
    handle = installed.pop(kind, None)
    if handle is not None:
        handle._changes.close()


def _give(kind: type[Installation], before: Installation | None) -> None:
    """Put the nearest enclosing handle that has not ended in force again."""
    while before is not None and before._ended:
        before = before._before
    if before is not None:
        before._apply()
        installed[kind] = before


def end_all() -> None:
    """End every handle of every class, the youngest class first, also those that a ``with`` would restore."""
    with lock:
        for kind in reversed(_kinds):
            handle = current(kind)
            _take_away(kind)
            while handle is not None:
                handle._ended, handle = True, handle._before
