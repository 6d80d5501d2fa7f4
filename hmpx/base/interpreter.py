"""The Python interpreter: variables of running functions, collections of garbage, locks over forks."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_HOLDERS = 3  # of the dict of a frame's variables: the frame, a name for it here, an argument of getrefcount


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a function that runs in this thread, by name.

    Before Python 3.13, whoever asks a frame for its variables leaves a dict of them at the frame. What the function
    drops later would then live until it returns: a batch, or a model on a GPU. That dict is emptied, if nobody else has
    it (`locals()` returns the same one) and no debugger, which writes it back, is on.
    """
    kept: Any = frame.f_locals
    found = dict(kept)
    ours = type(kept) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else a module's or class's own dict
    if ours and sys.gettrace() is None and sys.getrefcount(kept) <= _HOLDERS:
        kept.clear()
    return found


@contextlib.contextmanager
def none_collected() -> Iterator[None]:
    """Suspend automatic garbage collection.

    A collection looks through everything that is alive, and takes longer than what hmpx does here; and it runs
    finalizers, which are code of others.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def lock() -> Any:
    """Return a new lock, which one thread may hold several times, and which a forked child finds free.

    The child has none of its parent's other threads, one of which may hold it.
    """
    return over_forks(threading.RLock())


def over_forks(lock: Any) -> Any:
    """Return `lock`, which is free in children from here on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock
