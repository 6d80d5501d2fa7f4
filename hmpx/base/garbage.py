"""The garbage collector, while hmpx makes or looks through many objects at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
