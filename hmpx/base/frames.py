"""Variables of running functions, read so that nothing stays held."""

from __future__ import annotations

import inspect
import sys
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
