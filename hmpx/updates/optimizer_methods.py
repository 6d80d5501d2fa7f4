"""Finds the methods of an optimizer class, beside `step`, that rewrite weights or gradients.

`first_step` and `second_step` of sharpness-aware minimisation are called by the training loop; schedule-free optimizers
move between two points in `train` and `eval`. Nothing declares such a method, so hmpx reads its code: it changes
tensors in place or assigns `.data`, itself or in methods of its class that it calls. A method that differentiates needs
the parameters that the graph was built from, and is left alone.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

_DIFFERENTIATES = {"backward", "autograd"}


def writing_methods(cls: type[Optimizer]) -> list[str]:
    """Return the public methods of `cls` that rewrite weights; torch's own classes have none."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith("torch.") and base is not object]
    names = dict.fromkeys(name for base in own for name, value in vars(base).items() if _function(value) is not None)
    public = [name for name in names if not name.startswith("_") and not hasattr(Optimizer, name)]
    return [name for name in public if _writes(cls, name)]


def _function(value: Any) -> types.FunctionType | None:
    function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
    return function if isinstance(function, types.FunctionType) else None


def _writes(cls: type, name: str) -> bool:
    found, seen = set(), set()
    todo = [name]
    while todo:
        name = todo.pop()
        function = _function(inspect.getattr_static(cls, name, None))
        if name in seen or function is None or name == "step":
            continue
        seen.add(name)
        names = set(_names(function.__code__))
        found |= names
        todo += [each for each in names if not hasattr(Optimizer, each)]
    in_place = any(each.endswith("_") and not each.endswith("__") for each in found)
    return (in_place or "data" in found) and not found & _DIFFERENTIATES


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
