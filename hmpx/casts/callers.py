"""Whose code is running: the user's line, and the wrapper that stands around an op."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator

import torch
import wrapt

WRITTEN = "<hmpx"  # how the file names of generated code begin
_TORCH, _WRAPT, _HMPX = (
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, wrapt.__file__, __file__)
)


def frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """`frame` and its callers, outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def users_line(frame: types.FrameType) -> str:
    """The innermost line that is neither torch's nor hmpx's, as `file:line`."""
    for f in frames(frame):
        path = f.f_code.co_filename
        if not path.startswith((_TORCH, _HMPX, _WRAPT, WRITTEN)):
            return f"{path}:{f.f_lineno}"
    return "?"
