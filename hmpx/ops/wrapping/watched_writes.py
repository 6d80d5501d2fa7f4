"""Watches writes that do not raise a tensor's `_version`, while a cache of casts is open.

They are `.data`, and the ways to the memory itself. Taking one of them drops the casts that are kept of the tensor, or
of one in the same storage: see `weight_cache`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor

from hmpx.changes import Attribute, Changes
from hmpx.process_state import open_caches

Tensor = torch.Tensor
_data = torch._C.TensorBase.__dict__["data"]
_TO_MEMORY = ("numpy", "untyped_storage", "data_ptr", "__dlpack__")


def watch_writes(changes: Changes) -> None:
    """Let every open cache drop casts of tensors that may be written to, until `changes` are undone."""
    for name, watched in _watched.items():
        changes.put(Attribute(Tensor, name, f"torch.Tensor.{name}"), watched)


def _read_data(tensor: Tensor) -> Tensor:
    _forget_written(tensor)
    return _data.__get__(tensor)


def _write_data(tensor: Tensor, value: Tensor) -> None:
    _forget_written(tensor)
    _data.__set__(tensor, value)


def _watch(name: str) -> Callable:
    function = getattr(Tensor, name)

    @functools.wraps(function)
    def watched(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        _forget_written(tensor)
        return function(tensor, *args, **kwargs)

    return watched


_watched: dict[str, Any] = {"data": property(_read_data, _write_data, doc=_data.__doc__)}
_watched.update((name, _watch(name)) for name in _TO_MEMORY)


def _forget_written(tensor: Tensor) -> None:
    if isinstance(tensor, FakeTensor):  # a compiler's, which has no memory
        return
    for cache in list(open_caches.values()):
        cache.forget({id(tensor)})
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors without storage
            cache.forget_storage(tensor)
