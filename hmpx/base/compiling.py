"""Decorators that tell torch.compile to trace a function of hmpx, to leave it to Python, or to take its result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, ModuleType

import wrapt


def never_compile_alone(*functions: Callable) -> None:
    """torch.compile may trace through these functions, but never makes one of them a graph of its own.

    Such a graph would lose what they tell the rest of the thread.
    """

    def skip(eval_frame: ModuleType) -> None:
        for function in functions:
            eval_frame.skip_code(function.__code__)

    wrapt.register_post_import_hook(skip, "torch._dynamo.eval_frame")


def never_compile(function: Callable) -> None:
    """torch.compile neither traces into this function nor compiles what it calls."""

    vars(function)["_torchdynamo_disable"] = True
    _leave_to_python(function.__code__)


@functools.cache  # the functions that one definition makes share their code
def _leave_to_python(code: CodeType) -> None:
    def skip(eval_frame: ModuleType) -> None:
        action = eval_frame.FrameAction.SKIP
        eval_frame.set_code_exec_strategy(code, eval_frame.FrameExecStrategy(action, action))

    wrapt.register_post_import_hook(skip, "torch._dynamo.eval_frame")


def ask_once(function: Callable) -> None:
    """torch.compile calls this function when it traces, and takes its result for a constant."""
    wrapt.register_post_import_hook(lambda dynamo: dynamo.assume_constant_result(function), "torch._dynamo")
