"""The containers in which calls hand over tensors: lists, tuples and mappings, of classes derived from them too."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

# What most arguments are that hold nothing; to ask whether one is a mapping takes longer.
ATOMS: frozenset[type] = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_COPIED = (OrderedDict, defaultdict)  # by their method: Dynamo knows that


def leaves(values: Iterable[Any]) -> list[Any]:
    """Return `values`, with what containers among them hold in the place of these."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor) or type(value) in ATOMS:
            found.append(value)
        elif isinstance(value, (list, tuple)):  # Dynamo of torch 2.9 cannot trace `list | tuple`
            found += leaves(value)
        elif isinstance(value, Mapping):
            found += leaves(value.values())
        else:
            found.append(value)
    return found


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among `values`, in containers too."""
    return [value for value in leaves(values) if isinstance(value, Tensor)]


def with_items(container: Any, items: Collection[Any]) -> Any:
    """Return a container of the same class with other items, of the same keys for a mapping.

    A mapping that cannot be written to becomes a dict, as for ``torch.amp.custom_fwd(cast_inputs=...)``.
    """
    new: Any
    kind: Any = type(container)
    if kind in (list, tuple):
        return kind(items)
    if isinstance(container, tuple):
        if hasattr(container, "_fields"):
            return kind(*items)
        try:
            new = tuple.__new__(kind, items)
        except TypeError:  # one of `torch.return_types`
            return kind(items)
        vars(new).update(vars(container))
        return new
    if kind is dict or not isinstance(container, (list, MutableMapping)):
        return dict(zip(container.keys(), items, strict=True))
    new = kind.copy(container) if kind in _COPIED else copy.copy(container)
    for key, item in zip(range(len(items)) if isinstance(new, list) else list(new.keys()), items, strict=True):
        new[key] = item
    return new
