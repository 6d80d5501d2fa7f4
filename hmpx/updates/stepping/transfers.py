"""Transfers move a chunk between held tensors and FP32 copies: by the kernels, or torch's operators.

A chunk takes one of them when it is made. All leave the same bits. The copies lie in a room of a bounded number of
elements, or of those of one parameter, so a step takes some parameters at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeVar

import torch

from hmpx.base.torch_private import copy_all
from hmpx.rounding import native
from hmpx.rounding.devices import kernels_for
from hmpx.rounding.shared import name_id
from hmpx.rounding.table import Table, TableRow, row_of_move, run_all
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.holding.sharding import local
from hmpx.updates.holding.stores import Store

Tensor = torch.Tensor
BF16 = torch.bfloat16
_APART = 16  # elements: each copy in a room begins at a multiple of it


@dataclass(eq=False, slots=True)
class Piece:
    """A held tensor, and the FP32 copy of it that the optimizer sees.

    Attributes:
        name: the name that its random numbers depend on.
        at: where the copy begins in the room.
        x: the copy, once `place_in` has made it.
    """

    held: Held
    segment: Segment
    name: str
    at: int = 0
    x: Tensor = field(init=False)

    @property
    def end(self) -> int:
        """Where the copy ends in the room."""
        return self.at + -(-self.segment.count // _APART) * _APART

    def place_in(self, room: Tensor | None, like: Tensor) -> None:
        """Make `x`, which lies as ``torch.empty_like(like)``, in the room; without one, in memory of its own."""
        if room is None:
            self.x = torch.empty_like(like, dtype=torch.float32, requires_grad=False)
            return
        flat = room[self.at : self.at + self.segment.count]
        if like.is_contiguous():
            flat = flat.view(like.shape)
        else:
            flat = flat.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
        self.x = flat.data  # with a version of its own

    def kernels(self, tensor: Tensor) -> ModuleType | None:
        """Return the kernels that can move it to and from `tensor`, in one piece; None if there are none."""
        first = self.segment.first
        if first is None or first + tensor.numel() > 2**32 or self.held.for_kernels(self.segment, 0) is None:
            return None
        return kernels_for(tensor)


class Launches:
    """Launches of the kernels: in C one reads a chunk and one writes it, in Triton one for each way to hold tensors.

    Their words are in a table with those of all chunks of the step, which has been sent when a chunk is stepped.

    Args:
        grads: copies of gradients, which are read and not written.
        indices: of the gradients, each among all `gradients` of the step.
        pieces: everything that is read and written.
    """

    def __init__(
        self,
        grads: Sequence[Piece],
        indices: Sequence[int],
        gradients: Sequence[Tensor],
        pieces: Sequence[Piece],
        table: Table,
    ) -> None:
        both = list(zip(grads, indices, strict=True))
        rows = [_row(piece, i, gradients[i]) for piece, i in both if gradients[i].dtype is BF16]
        self._plain = [(piece.x, i) for piece, i in both if gradients[i].dtype is not BF16]  # FP32: no kernel copies it
        self._reads = table.add("move_list", [*rows, *map(_row, pieces)])
        self._writes = table.add("move_list", [_row(piece, is_read=False) for piece in pieces])
        self._weights = [piece.held.tensor for piece in pieces if isinstance(piece.held, Store)]

    def read(self, gradients: Sequence[Tensor]) -> None:
        """Fill the tensors that the optimizer sees. gradients: those of all parameters of the step, on this rank."""
        run_all(self._reads)
        if self._plain:
            copy_all([x for x, _ in self._plain], [gradients[i] for _, i in self._plain])

    def write(self, rounding_key: RoundingKey) -> None:
        """Write the results of the optimizer back, and tell autograd of the weights."""
        run_all(self._writes)
        torch.autograd.graph.increment_version(self._weights)


def _row(piece: Piece, grad: int | None = None, gradient: Tensor | None = None, *, is_read: bool = True) -> TableRow:
    """Return the row that reads or writes a piece. For the gradient: its index, and the tensor that is copied."""
    held, segment = piece.held.for_kernels(piece.segment, name_id(piece.name)), piece.segment
    assert held is not None, "the kernels can move it"
    held = held if gradient is None else held._replace(tensor=gradient)
    return row_of_move(held, piece.x, segment.first or 0, is_read=is_read, grad=grad, room=piece.at * 4)


def row_back(piece: Piece, index: int, gradient: Tensor) -> TableRow:
    """Return the row that rounds the copy of a gradient to the gradient itself. index: among all gradients."""
    row = row_of_move(native.StoredTensor(gradient, native.NEAREST), piece.x, is_read=False, room=piece.at * 4)
    return row._replace(grad=(1, index))


class Operators:
    """Plain copies go through torch's foreach kernels; each other tensor reads and writes itself. See `Launches`."""

    def __init__(self, grads: Sequence[Piece], indices: Sequence[int], pieces: Sequence[Piece]) -> None:
        self._grads, self._indices, self._pieces = grads, indices, pieces
        self._copied = [piece for piece in pieces if type(piece.held).read is Held.read]
        self._others = [piece for piece in pieces if type(piece.held).read is not Held.read]

    def read(self, gradients: Sequence[Tensor]) -> None:
        """Fill the tensors that the optimizer sees. gradients: those of all parameters of the step, on this rank."""
        copied = [*self._grads, *self._copied]
        if copied:
            held = [*(gradients[i] for i in self._indices), *(local(piece.held.tensor) for piece in self._copied)]
            copy_all([piece.x for piece in copied], held)
        for piece in self._others:
            piece.held.read(piece.segment, piece.x)

    def write(self, rounding_key: RoundingKey) -> None:
        for piece in self._pieces:
            piece.held.write(piece.segment, piece.x, piece.name, rounding_key)
        rounding_key.flush()


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
