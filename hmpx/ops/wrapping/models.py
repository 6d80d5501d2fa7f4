"""Tells which modules are models, of those that nothing else runs around: the outermost ones with parameters.

A module without parameters is a metric or a transform of data. One that writes its own parameters when it is called
keeps an average. Either is a part of the model where a model calls it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.base.torch_private import has, version_of

_counts_writes = has("torch.Tensor._version")
Module = torch.nn.Module


def has_parameters(module: Module) -> bool:
    """Return whether a module, or one in it, has a parameter; a replica of DataParallel has had some."""
    if next(module.parameters(), None) is not None:
        return True
    return any(vars(each).get("_former_parameters") for each in module.modules())


def is_model(module: Module) -> bool:
    """Return whether the forward of a module that is outermost is a model's."""
    return id(module) in process_state.models or (id(module) not in process_state.averages and has_parameters(module))


def run_first(module: Module, forward: Callable, cast: Callable, args: tuple, kwargs: dict) -> Any:
    """Make the first call of a module that has parameters, and note whether it is a model or keeps an average.

    forward: the call. cast: runs it as the forward of a model; one that is handed a module is not run so this time.
    """
    before = [(p, version_of(p)) for p in module.parameters() if type(p) is torch.nn.Parameter and not p.is_inference()]
    handed = _holds((*args, *kwargs.values()), (Module, torch.nn.Parameter))
    if handed:
        _note(process_state.averages, module)
    result = forward(module, *args, **kwargs) if handed else cast(forward, (module, *args), kwargs)
    # ``p.data.copy_()`` counts as no write, and nothing does where torch does not count.
    written = _counts_writes and any(version_of(p) != version for p, version in before)
    returns, trained = _holds((result,), (torch.Tensor,)), any(p.requires_grad for p in module.parameters())
    if (written and not trained) or ((written or handed) and not returns):
        _note(process_state.averages, module)
    else:
        process_state.averages.pop(id(module), None)
        _note(process_state.models, module)
    return result


def _note(noted: dict[int, Any], module: Module) -> None:
    key = id(module)
    noted[key] = weakref.ref(module, lambda _: noted.pop(key, None))


def _holds(values: Iterable[Any], kinds: tuple[type, ...]) -> bool:
    for value in values:
        if isinstance(value, kinds):
            return True
        if isinstance(value, dict):
            value = value.values()
        if isinstance(value, (list, tuple, type({}.values()))) and _holds(value, kinds):
            return True
    return False
