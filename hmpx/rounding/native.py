"""The CPU kernels in C, as Python calls them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hmpx.rounding.keys import key_of
from hmpx.rounding.kinds import (  # noqa: F401  whoever makes a `StoredTensor` asks this module for its kind
    BF16,
    CODED,
    FOUR,
    FP8,
    FP32,
    KERNELS,
    MASTER,
    NEAREST,
    SCALARS,
    SPLIT,
    SPLIT8,
)
from hmpx.rounding.native_library import library

PLAIN = (torch.Tensor, torch.nn.Parameter)  # another class may hold its values elsewhere

KINDS = {torch.float32: FP32, torch.bfloat16: BF16}
_STATES = 3  # of a parameter


class StoredTensor(NamedTuple):
    """A contiguous tensor of a parameter, in the form in which it is held between two steps.

    kind: a kind of `native_stored.c`. name: the hash of its name.
    beside: masters or lower halves, of the same shape; or the scales of codes, which lie in rows of `row` elements.
    """

    tensor: torch.Tensor
    kind: int
    name: int = 0
    beside: torch.Tensor | None = None
    row: int = 0

    @property
    def size(self) -> int:
        return self.tensor.numel() * (2 if self.kind == FOUR else 1)

    @classmethod
    def of(cls, tensor: torch.Tensor, name: int = 0) -> StoredTensor:
        """Return an FP32 tensor, or a BF16 one that is rounded stochastically."""
        return cls(tensor, KINDS[tensor.dtype], name)


class StepArguments(NamedTuple):
    """One parameter of `step_list`.

    weight, grad, states: of one shape; the gradient is FP32 or BF16. States stand in the order of `native_steps.c`,
        with None where the optimizer keeps none.
    scalars: at most 12, which `native_steps.c` names.
    first: the index of the first element in the whole parameter, of which this may be a part: elements that follow one
        another, among the first 2^32.
    """

    weight: StoredTensor
    grad: StoredTensor
    states: tuple[StoredTensor | None, ...]
    scalars: tuple[float, ...] = ()
    first: int = 0

    def tensors(self) -> tuple[StoredTensor | None, ...]:
        """Return all of them, with as many states as kernels have room for."""
        return self.weight, self.grad, *self.states, *(None,) * (_STATES - len(self.states))

    @property
    def row(self) -> int:
        """The length of the rows in which codes of state lie; without codes, that of the parameter."""
        return max([state.row for state in self.states if state is not None], default=0) or self.weight.tensor.numel()


def start(kernel: str, address: int, count: int, *more: int) -> None:
    """Call a kernel for `count` rows of a table that begin at this address. Needs `library()`."""
    getattr(_kernels(), kernel)(address, count, torch.get_num_threads(), *more)


def scalars_of(scalars: tuple[float, ...]) -> tuple[float, ...]:
    """Return the scalars, padded to the number that the kernels read."""
    return (*scalars, *(0.0,) * (SCALARS - len(scalars)))


def padded(scalars: Sequence[tuple[float, ...]]) -> array[float]:
    """Return the scalars of parameters one after the other; most lists have the same object again and again."""
    if scalars and scalars.count(scalars[0]) == len(scalars):
        return array("f", scalars_of(scalars[0])) * len(scalars)
    return array("f", [number for each in scalars for number in scalars_of(each)])


def put_keys(words: array[int], places: array[int], names: array[int], step_key: int) -> None:
    """Write the key of each name into its place among the words."""
    found = library()
    if found is None:
        for place, name in zip(places, names, strict=True):
            words[place] = key_of(step_key, name)
    elif names:
        found.put_keys(*(each.buffer_info()[0] for each in (words, places, names)), len(names), step_key)


def counts_at(addresses: array[int]) -> array[float]:
    """Return FP32 numbers on the CPU. Needs `library()`."""
    found = array("f", bytes(4 * len(addresses)))
    _kernels().read_floats(addresses.buffer_info()[0], len(addresses), found.buffer_info()[0])
    return found


def raise_counts(addresses: array[int]) -> None:
    """Add 1 to each of these FP32 numbers on the CPU. Needs `library()`."""
    _kernels().add_one(addresses.buffer_info()[0], len(addresses))


class Spans(NamedTuple):
    """Where tensors lie in one block of memory: the byte at which each begins there, and how many it has."""

    offsets: array[int]
    sizes: array[int]

    def fill(self, base: int, addresses: array[int]) -> None:
        """Copy the bytes at these addresses to their places. Needs `library()`, as the next."""
        _kernels().copy_bytes(base, *self._arguments(addresses))

    def differing(self, base: int, addresses: array[int], *, widened: bool = False) -> list[int]:
        """Return the indices of the places that hold other bytes than their addresses.

        widened: FP32 numbers lie in the places, and BF16 ones, which have the `sizes`, at the addresses.
        """
        differ = array("B", bytes(len(addresses)))
        compare = _kernels().compare_widened if widened else _kernels().compare_bytes
        compare(base, *self._arguments(addresses), differ.buffer_info()[0])
        return [i for i, one in enumerate(differ) if one] if any(differ) else []

    def _arguments(self, addresses: array[int]) -> tuple[int, ...]:
        arrays = self.offsets, addresses, self.sizes
        return *[each.buffer_info()[0] for each in arrays], len(addresses), torch.get_num_threads()


def _kernels() -> ctypes.CDLL:
    """Return `library()` for callers that have checked that it exists."""
    found = library()
    assert found is not None, "there are no C kernels"
    return found


def can_read(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels exist and can read these tensors of equal shape."""
    if library() is None:
        return False
    shape = tensors[0].shape
    for tensor in tensors:  # a loop, as every step asks this of every parameter
        if not tensor.is_cpu or not is_plain(tensor) or tensor.shape != shape:
            return False
    return True


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values lie one after the other at its pointer, with their own signs."""
    if type(tensor) not in PLAIN or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return False
    return not tensor.is_neg() and (tensor.data_ptr() != 0 or not tensor.numel())
