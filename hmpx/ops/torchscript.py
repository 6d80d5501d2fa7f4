"""TorchScript under a conversion: it compiles the original of a wrapper, and so does not cast.

`torch.jit.script` knows torch's builtins by identity and reads the source of everything else; a wrapper is neither. It
scripts for itself too, when `torch.func.jvp` is used for the first time.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch.jit._builtins
import torch.jit._recursive
from torch.jit import _recursive

from hmpx.changes import Attribute, Changes, Item

_table = torch.jit._builtins._get_builtin_table()  # of torch's own functions, while they are in their places


class Scripting:
    """A part that shows TorchScript the originals in place of the wrappers.

    find: gives the originals by wrapper. It is called where they are needed: a wrapper that is held here would look as
    if somebody had taken it (`Rebinding.expect`).
    """

    def __init__(self, find: Callable[[], Mapping[Callable, Callable]]) -> None:
        self._find = find
        self._originals: dict[int, Callable] = {}  # by identity of the wrapper

    def apply(self, changes: Changes) -> None:
        self.extend(self._find(), changes)
        for name in ("try_compile_fn", "make_stub"):
            seeing = self._seeing(getattr(_recursive, name))
            changes.put(Attribute(_recursive, name, f"torch.jit._recursive.{name}"), seeing)

    def extend(self, originals: Mapping[Callable, Callable], changes: Changes) -> None:
        """Add wrappers whose originals TorchScript is to see, until `changes` are undone."""
        for wrapper, original in originals.items():
            self._originals[id(wrapper)] = original
            if id(original) in _table:
                changes.put(Item(_table, id(wrapper), "TorchScript's table of builtins"), _table[id(original)])

    def _seeing(self, compile_function: Callable) -> Callable:
        """A TorchScript function that takes a function first, wrapped to receive the original of a wrapper."""
        return lambda function, *rest: compile_function(self._own(function), *rest)

    def _own(self, function: Any) -> Any:
        """The function that torch or the user wrote; of a bound method, bound again."""
        original = self._originals.get(id(getattr(function, "__func__", function)))
        if original is None:
            return function
        return types.MethodType(original, function.__self__) if isinstance(function, types.MethodType) else original
