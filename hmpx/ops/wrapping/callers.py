"""Reads the call stack and functions: the user's line, and the wrapper around an op."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Iterator

import torch
import wrapt

from hmpx import errors
from hmpx.base.process_state import code_rules
from hmpx.base.raw import variables
from hmpx.ops.policies.policy import Rule

WRITTEN = "<hmpx"  # how the file names of generated code begin
_TORCH, _WRAPT, _HMPX = (  # `errors` is a file of the package's own folder
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, wrapt.__file__, errors.__file__)
)

_passed_over: dict[int, types.CodeType] = {}
_libraries: dict[int, tuple[types.CodeType, bool]] = {}


def register(code: types.CodeType, rule: Rule) -> None:
    """Note that wrappers under `rule`, and no others, run this code."""
    code_rules[id(code)] = code, rule


def rule_of(code: types.CodeType) -> Rule | None:
    """Return the rule of the wrapper that this code is; None if it is no wrapper."""
    return code_rules.get(id(code), (None, None))[1]


def pass_over(code: types.CodeType) -> None:
    """Note that this code only forwards a call: whoever looks for the caller skips its frame."""
    _passed_over[id(code)] = code


def calling(frame: types.FrameType) -> types.FrameType:
    """Return `frame`, or the frame that it forwards a call for."""
    while id(frame.f_code) in _passed_over and frame.f_back is not None:
        frame = frame.f_back
    return frame


def frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield `frame` and its callers, outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(code: types.CodeType) -> bool:
    """Return whether code is torch's or hmpx's, looked up once. Code objects are kept, so ids stay unique."""
    known = _libraries.get(id(code))
    if known is None:
        known = _libraries[id(code)] = code, code.co_filename.startswith((_TORCH, _HMPX, _WRAPT, WRITTEN))
    return known[1]


def users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the innermost frame that is neither torch's nor hmpx's."""
    while frame is not None and _is_library(frame.f_code):
        frame = frame.f_back
    return frame


def users_line(frame: types.FrameType) -> str:
    """Return the user's line that is running, as `file:line`."""
    found = users_frame(frame)
    return "?" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"


def methods(frame: types.FrameType | None) -> Iterator[tuple[torch.nn.Module, str]]:
    """Yield the modules whose methods are running, innermost first, each with the name of the method.

    A method has a `self`, or is called `forward`; ``train(model, ...)`` is none.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and (code.co_varnames[0] == "self" or code.co_name == "forward"):
            owner = variables(frame).get(code.co_varnames[0])
            if isinstance(owner, torch.nn.Module):
                yield owner, code.co_name
        frame = frame.f_back


def modules(frame: types.FrameType | None) -> Iterator[torch.nn.Module]:
    """Yield the modules whose methods are running, innermost first; a module may occur several times."""
    return (module for module, _ in methods(frame))


def runs_later(function: Callable) -> bool:
    """Return whether the body of a function runs after the call: a generator or coroutine function."""
    later = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    return any(test(function) for test in later)
