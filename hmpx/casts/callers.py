"""Whose code is running: the user's line, and the wrapper that stands around an op."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator

import torch
import wrapt

from hmpx.casts.policy import Rule
from hmpx.process_state import rules

WRITTEN = "<hmpx"  # how the file names of generated code begin
_TORCH, _WRAPT, _HMPX = (
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, wrapt.__file__, __file__)
)


def register(code: types.CodeType, rule: Rule) -> None:
    """A wrapper that casts as `rule` says runs this code, and none under another rule does."""
    rules[id(code)] = code, rule


def rule_of(frame: types.FrameType) -> Rule | None:
    """The rule of the wrapper that runs in `frame`; None where it is another function's."""
    return rules.get(id(frame.f_code), (None, None))[1]


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
