"""The containers in which calls hand over tensors: lists, tuples and mappings, of classes derived from them too."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

# What most arguments are that hold nothing; to ask whether one is a mapping takes longer.
ATOMS: frozenset[type] = frozenset({type(None), bool, int, float, str})


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """Yield `values`, with what containers among them hold in the place of these."""
    for value in values:
        if isinstance(value, Tensor) or type(value) in ATOMS:
            yield value
        elif isinstance(value, (list, tuple)):  # Dynamo of torch 2.9 cannot trace `list | tuple`
            yield from leaves(value)
        elif isinstance(value, Mapping):
            yield from leaves(value.values())
        else:
            yield value


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`, in containers too."""
    for value in leaves(values):
        if isinstance(value, Tensor):
            yield value


def with_items(container: Any, items: Collection[Any]) -> Any:
    """Return a container of the same class with other items, of the same keys for a mapping.

    A mapping that cannot be written to becomes a dict, as for ``torch.amp.custom_fwd(cast_inputs=...)``.
    """
    kind = type(container)
    if kind in (list, tuple):
        return kind(items)
    if isinstance(container, tuple):
        if hasattr(container, "_fields"):
            return kind(*items)
        try:
            new: Any = tuple.__new__(kind, items)
        except TypeError:  # one of `torch.return_types`
            return kind(items)
        vars(new).update(vars(container))
        return new
    if kind is dict or not isinstance(container, (list, MutableMapping)):
        return dict(zip(container, items, strict=True))
    new = copy.copy(container)
    for key, item in zip(range(len(items)) if isinstance(new, list) else list(new), items, strict=True):
        new[key] = item
    return new
