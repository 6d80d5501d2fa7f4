"""Locks that a forked child finds free, with nothing half made behind them.

A child has none of its parent's other threads. A lock that one of these held would stay locked there for ever, and what
that thread was about to change, such as the patches of a conversion, would stay half changed. So a fork waits until
nobody holds any of the locks made here.
"""

from __future__ import annotations

import os
import threading
from typing import Any

_locks: list[Any] = []
_held: list[Any] = []  # by the fork that is going on
_forking = threading.Lock()  # one thread forks at a time


def lock() -> Any:
    """Return a new lock, which one thread may hold several times."""
    return over_forks(threading.RLock())


def over_forks(lock: Any) -> Any:
    """Return `lock`; forks wait for it from here on."""
    _locks.append(lock)
    return lock


def _hold() -> None:
    """Take every lock. One that is not free for a while may belong to a thread that waits for another of them."""
    _forking.acquire()
    while len(_held) < len(_locks):
        each = _locks[len(_held)]
        if each.acquire(timeout=0.05):
            _held.append(each)
        else:
            _let_go()


def _let_go() -> None:
    while _held:
        _held.pop().release()


def _release() -> None:
    _let_go()
    _forking.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release)
