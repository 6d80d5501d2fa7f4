"""Finds where the source of a model's classes says "FP32 here": regions of `torch.autocast` that are not enabled."""

from __future__ import annotations

import ast
import functools
import inspect
import os
import textwrap
from collections.abc import Iterator

import torch

_REGIONS = frozenset({"autocast", "maybe_autocast"})  # torch's, under each of its names, and transformers'


def islands(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the lines with such a region, as "file:line of Class", each with the modules whose methods they are in.

    A region in a function that a method calls is not found, nor one whose `enabled` is computed.
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
    found: list[str] = []
    for function in {id(each): each for each in map(inspect.unwrap, filter(callable, vars(cls).values()))}.values():
        if inspect.isfunction(function):
            found += _in_function(function)
    return tuple(dict.fromkeys(found))


def _in_function(function: object) -> Iterator[str]:
    try:
        lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # its source is not to be had
        return
    file = os.path.basename(inspect.getfile(function))  # type: ignore[arg-type]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_off(node):
            yield f"{file}:{first + node.lineno - 1}"


def _is_off(call: ast.Call) -> bool:
    """Return whether a call makes a region that is not enabled, or the forward of a function that casts its inputs."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {each.arg: each.value for each in call.keywords}
    if name == "custom_fwd":
        return "cast_inputs" in given
    if name not in _REGIONS:
        return False
    values = [*given.values(), *call.args]
    off = [given["enabled"]] if "enabled" in given else [each for each in values if isinstance(each, ast.Constant)]
    return any(isinstance(each, ast.Constant) and each.value is False for each in off) or any(
        isinstance(each, ast.Attribute) and each.attr in ("float32", "float64") for each in values
    )
