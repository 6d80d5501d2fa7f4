"""Tells whose output a tensor is, where models have different lists: the model whose forward has made it.

The outputs of a model carry the number of its lists: in their storage, which views and detached tensors share, and in
their node of autograd's graph, to which the nodes of what is computed of them lead. Parameters are their model's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hmpx.base import process_state as state

Tensor = torch.Tensor
_KEY = "_hmpx_lists"
_FAR = 1000  # nodes, further than which nobody looks
_storage_of = Tensor.untyped_storage


def mark(value: Any, lists: int) -> None:
    """Note that the tensors in a value are the output of the model with these lists."""
    for tensor in _tensors_in(value):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_KEY, tensor.output_nr] = lists
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no storage
            setattr(_storage_of(tensor), _KEY, lists)


def _tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        if isinstance(value, dict):
            inside: Iterable = value.values()
        elif isinstance(value, (list, tuple)):
            inside = value
        elif dataclasses.is_dataclass(value) or isinstance(value, torch.distributions.Distribution):
            inside = vars(value).values()
        else:
            return
        for each in inside:
            yield from _tensors_in(each, depth - 1)


def lists_of_tensors(tensors: Iterable[Tensor]) -> int:
    """Return the lists of the one model whose output these tensors are; 0 if there is none, or several.

    Those that require a gradient go first: a student's output beside its teacher's.
    """
    return agreed((tensor.requires_grad, lists_of_tensor(tensor)) for tensor in tensors)


def lists_of_node(node: Any) -> int:
    """Return the lists of the one model from whose outputs a node of autograd's graph was computed."""
    found = set(_lists_behind([(node, 0)]))
    return found.pop() if len(found) == 1 else 0


def agreed(found: Iterable[tuple[bool, Iterable[int]]]) -> int:
    """Return the lists that all tensors that require a gradient have, or else all; each comes with its lists."""
    by_need: tuple[set[int], set[int]] = set(), set()
    for requires_grad, lists in found:
        by_need[requires_grad].update(lists)
    lists = by_need[True] or by_need[False]
    return lists.pop() if len(lists) == 1 else 0


def lists_of_tensor(tensor: Tensor) -> Iterable[int]:
    with contextlib.suppress(RuntimeError, NotImplementedError):
        if lists := getattr(_storage_of(tensor), _KEY, 0):
            return (lists,)
    if isinstance(tensor, torch.nn.Parameter):
        return filter(None, (state.lists_of_parameters.get(tensor, 0),))
    return _lists_behind([(tensor.grad_fn, tensor.output_nr)])


def _lists_behind(waiting: list[tuple[Any, int]]) -> Iterator[int]:
    """Yield the lists of the nearest outputs of models in autograd's graph behind some nodes."""
    seen: set[tuple[Any, int]] = set()
    while waiting and len(seen) < _FAR:
        node, number = place = waiting.pop()
        if node is None or place in seen:
            continue
        seen.add(place)
        leaf = getattr(node, "variable", None)
        lists = node.metadata.get((_KEY, number), 0) if leaf is None else state.lists_of_parameters.get(leaf, 0)
        if lists:
            yield lists
        else:
            waiting.extend(node.next_functions)
