"""TorchScript under a conversion: it compiles the original of a wrapper, and so does not cast.

`torch.jit.script` knows torch's builtins by identity and reads the source of everything else; a wrapper is neither. It
scripts for itself too, when `torch.func.jvp` is used for the first time.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch.jit._builtins
import torch.jit._recursive
from torch.jit import _recursive

_table = torch.jit._builtins._get_builtin_table()  # of torch's own functions, while they are in their places
_KEPT = {name: getattr(_recursive, name) for name in ("try_compile_fn", "make_stub")}
_registered: list[int] = []
_originals: dict[int, Callable] = {}


def install(originals: dict[Callable, Callable]) -> None:
    """Let TorchScript see the originals in place of the wrappers, which are the keys."""
    for wrapper, original in originals.items():
        _originals[id(wrapper)] = original
        if id(original) in _table:
            _table[id(wrapper)] = _table[id(original)]
            _registered.append(id(wrapper))
    _recursive.try_compile_fn = lambda function, *rest: _KEPT["try_compile_fn"](_own(function), *rest)
    _recursive.make_stub = lambda function, *rest: _KEPT["make_stub"](_own(function), *rest)


def uninstall() -> None:
    """Take that back."""
    for name, function in _KEPT.items():
        setattr(_recursive, name, function)
    while _registered:
        _table.pop(_registered.pop(), None)
    _originals.clear()


def _own(function: Any) -> Any:
    """The function that torch or the user wrote; of a bound method, bound again."""
    original = _originals.get(id(getattr(function, "__func__", function)))
    if original is None:
        return function
    return types.MethodType(original, function.__self__) if isinstance(function, types.MethodType) else original
