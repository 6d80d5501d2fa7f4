"""Locks that a forked child finds free: it has none of its parent's other threads, one of which may hold one."""

from __future__ import annotations

import os
import threading
from typing import Any


def lock() -> Any:
    """Return a new lock, which one thread may hold several times."""
    return over_forks(threading.RLock())


def over_forks(lock: Any) -> Any:
    """Return `lock`, which is free in children from here on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock
