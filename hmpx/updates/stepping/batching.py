"""How many parameters a step takes at once: a bounded number of elements, and at least one parameter."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

_FLOOR, _CEILING = 1 << 17, 1 << 20
_FLOOR_OF_ACCELERATORS = 1 << 20
_PARTS = 60
_MOST_OF_PART = 1 << 24  # elements of a step in backward, while activations are there
_SHARE = 32  # of a GPU's memory, this part of which a step may take: activations are gone by then
_BYTES = 24  # an element: FP32 weight, gradient, new state and temporaries
T = TypeVar("T")


def room_size(elements: int, device: torch.device | None = None, *, is_part: bool = False) -> int:
    """Return the number of elements that are stepped at once, of a model of `elements` elements on a rank.

    Fewer than `_FLOOR` spend more time on calls than on updates; the buffers of more than `_CEILING` do not stay in the
    cache of a CPU. On an accelerator, where calls cost more and there is no such cache, the step of any model has about
    `_PARTS` parts, or as few as fit into a `_SHARE` of the memory.

    is_part: they are stepped in backward.
    """
    size = max(elements // _PARTS, _FLOOR)
    if device is None or device.type == "cpu":
        return min(size, _CEILING)
    size = max(size, _FLOOR_OF_ACCELERATORS, _memory(device) // _SHARE // _BYTES)
    return min(size, max(elements // _PARTS, _MOST_OF_PART)) if is_part else size


@functools.cache
def _memory(device: torch.device) -> int:
    """Return the bytes of memory of a GPU; 0 of another device, and of a GPU that is not here."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).total_memory if is_here else 0


def together(parameters: Iterable[T], size: int, count: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of parameters that have at most `size` elements together; a larger one comes alone.

    Small ones come first: a wrong setting then raises before much is written.
    """
    few, free = list[T](), size
    for each in sorted(parameters, key=count):
        if few and count(each) > free:
            yield few
            few, free = [], size
        few.append(each)
        free -= count(each)
    if few:
        yield few
