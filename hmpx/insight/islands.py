"""Finds where the source of a model's classes says "FP32 here": regions of `torch.autocast` that are not enabled."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import os
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

_REGIONS = frozenset({"autocast", "maybe_autocast"})  # torch's, under each of its names, and transformers'


def islands(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the lines with such a region, as "file:line of Class", each with the modules whose methods they are in.

    Functions of the class's module that its methods call are looked through too. A region is not found in other
    functions, nor where its `enabled` is computed.
    """
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if not cls.__module__.startswith(("torch.", "builtins")):
                for line in _lines(cls):
                    found.setdefault(f"{line} of {cls.__name__}", []).append(name or type(module).__name__)
    return found


@functools.cache
def _lines(cls: type) -> tuple[str, ...]:
    found: dict[str, None] = {}
    waiting: list[Any] = [*vars(cls).values()]
    seen: set[int] = set()
    for each in waiting:  # which gets longer
        function = inspect.unwrap(each) if callable(each) else each
        if id(function) in seen:
            continue
        seen.add(id(function))
        if inspect.isfunction(function) and function.__module__ == cls.__module__:
            found |= dict.fromkeys(_in_function(function))
            called = [function.__globals__.get(name) for name in function.__code__.co_names]
            waiting += [each for each in called if isinstance(each, FunctionType | type)]
        elif isinstance(function, type) and issubclass(function, torch.autograd.Function):
            waiting += vars(function).values()
    return tuple(found)


def _in_function(function: FunctionType) -> Iterator[str]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # its source is not to be had
        return
    file = os.path.basename(inspect.getfile(function))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_off(node, function.__globals__):
            yield f"{file}:{first + node.lineno - 1}"


def _is_off(call: ast.Call, names: dict[str, Any]) -> bool:
    """Return whether a call makes a region that is not enabled, or the forward of a function that casts its inputs."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {each.arg: each.value for each in call.keywords if each.arg}
    if name == "custom_fwd":
        return "cast_inputs" in given and not _is(given["cast_inputs"], None)
    function = names.get(name, torch.autocast)
    if name not in _REGIONS and function is not torch.autocast:
        return False
    if isinstance(call.func, ast.Attribute) and ast.unparse(call.func) in _OF_DEVICES:
        function = _OF_DEVICES[ast.unparse(call.func)]
    with contextlib.suppress(TypeError, ValueError):  # it is called otherwise, or has no signature
        given = inspect.signature(function).bind_partial(*call.args, **given).arguments
    dtype = given.get("dtype")
    is_wide = isinstance(dtype, ast.Attribute) and dtype.attr in ("float32", "float64")
    return is_wide or ("enabled" in given and _is(given["enabled"], False))


_OF_DEVICES = {"torch.cuda.amp.autocast": torch.cuda.amp.autocast, "torch.cpu.amp.autocast": torch.cpu.amp.autocast}


def _is(node: Any, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
