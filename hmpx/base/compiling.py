"""Calls back when a module is imported, and tells torch.compile, once Dynamo is, about functions of hmpx.

Of a function it says whether to trace it, to leave it to Python, or to take its result for a constant.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any, TypeVar

import torch
import wrapt

from hmpx.base import process_state
from hmpx.base.changes import Changes
from hmpx.base.torch_private import COMPILED, COMPILED_STEPS

Function = TypeVar("Function", bound=Callable[..., Any])


def when_imported(name: str, function: Callable[[ModuleType], object], changes: Changes) -> None:
    """Call `function(module)` as soon as a module is imported, before anybody else sees it, until `changes` are undone.

    A module that is there already is handed over at once.
    """
    if (module := sys.modules.get(name)) is not None:
        function(module)
        return
    if name not in process_state.awaited:  # import hooks cannot be removed: a module has one, which looks in here
        process_state.awaited[name] = []
        wrapt.register_post_import_hook(_imported, name)
    waiting = process_state.awaited[name]
    if function not in waiting:
        changes.callback(_stop_waiting, name, function)
        waiting.append(function)


def _stop_waiting(name: str, function: Callable) -> None:
    waiting = process_state.awaited.get(name, [])
    if function in waiting:
        waiting.remove(function)


def _imported(module: ModuleType) -> None:
    for function in process_state.awaited.pop(module.__name__, []):
        function(module)


def never_compile_alone(*functions: Callable) -> None:
    """torch.compile may trace through these functions, but never makes one of them a graph of its own.

    Such a graph would lose what they tell the rest of the thread.
    """

    def skip(dynamo: ModuleType) -> None:
        for function in functions:
            if COMPILED.is_on():
                dynamo.eval_frame.skip_code(function.__code__)
            else:
                never_compile(function)

    wrapt.register_post_import_hook(skip, "torch._dynamo")


def never_compile(function: Function) -> Function:
    """torch.compile neither traces into this function nor compiles what it calls. A decorator, too."""

    vars(function)["_torchdynamo_disable"] = True
    leave_to_python(function.__code__)
    return function


@functools.cache  # the functions that one definition makes share their code
def leave_to_python(code: CodeType) -> None:
    """torch.compile makes no graph of a function with this code, nor of what it calls; it may trace through it."""

    def skip(dynamo: ModuleType) -> None:
        if COMPILED_STEPS.is_on():
            action = dynamo.eval_frame.FrameAction.SKIP
            dynamo.eval_frame.set_code_exec_strategy(code, dynamo.eval_frame.FrameExecStrategy(action, action))

    wrapt.register_post_import_hook(skip, "torch._dynamo")


def ask_once(function: Callable) -> None:
    """torch.compile calls this function when it traces, and takes its result for a constant."""
    wrapt.register_post_import_hook(lambda _: torch.compiler.assume_constant_result(function), "torch._dynamo")


def with_dynamo(function: Callable[[ModuleType], object], changes: Changes) -> None:
    """Call `function(torch._dynamo)` once it is imported, until `changes` are undone, if casts can be compiled here."""
    when_imported("torch._dynamo", lambda dynamo: COMPILED.is_on() and function(dynamo), changes)
