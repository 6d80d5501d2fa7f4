"""Transfers move a batch between held tensors and FP32: by the kernels, or torch's operators.

A batch takes one of them when it is made. All leave the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch

from hmpx.base.torch_private import copy_all
from hmpx.rounding import native
from hmpx.rounding.calls import row_of_move
from hmpx.rounding.devices import kernels_for
from hmpx.rounding.keys import name_id
from hmpx.rounding.table import Table, TableRow, run_all
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.holding.stores import Store
from hmpx.updates.ranks.sharding import local

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32

_APART = 16  # elements: each copy in a room begins at a multiple of it


@dataclass(eq=False, slots=True)
class Piece:
    """One tensor of a segment, as a batch shows it to the optimizer.

    Attributes:
        name: the name that its random numbers depend on.
        at: where its FP32 copy begins in the room. None: there is no copy, the optimizer works on the held tensor.
        x: the tensor that the optimizer sees, once `show` has made it.
    """

    held: Held
    segment: Segment
    name: str
    at: int | None
    x: Tensor = field(init=False)

    @property
    def is_moved(self) -> bool:
        """Whether a transfer must move this tensor; also weights whose masters are stepped in place."""
        return self.at is not None or isinstance(self.held, Store)

    @property
    def takes(self) -> int:
        """The number of elements that it needs in the room."""
        return 0 if self.at is None else -(-self.segment.count // _APART) * _APART

    def show(self, room: Tensor, like: Tensor) -> None:
        """Make `x`. The copy of a flat part is flat; any other has the layout of `empty_like(like)`."""
        if self.at is None:
            itself = self.held.itself(self.segment)
            assert itself is not None, "the batch has asked for it"
            self.x = itself
            return
        flat = room[self.at : self.at + self.segment.count]
        if self.segment.start is None or self.segment.by_rows:
            held = self.segment.of(like)
            if held.is_contiguous():  # so is all of XLA, whose `as_strided` of a slice begins where its base does
                flat = flat.view(held.shape)
            else:
                flat = flat.as_strided(held.shape, torch.empty_like(held, device="meta").stride())
        self.x = flat.data  # with a version of its own


class Launches:
    """Launches of the kernels: in C one reads a batch and one writes it, in Triton one for each way to hold tensors.

    Their words are in a table with those of all batches of the step, which has been sent when a batch is stepped.

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
        copied = [_row(piece, i, gradients[i]) for piece, i in zip(grads, indices, strict=True)]
        self._reads = table.add("move_list", [*copied, *map(_row, pieces)])
        self._writes = table.add("move_list", [_row(piece, is_read=False) for piece in pieces])
        self._weights = [piece.held.tensor for piece in pieces if isinstance(piece.held, Store)]

    def read(self, grads: Sequence[Tensor]) -> None:
        """Fill the tensors that the optimizer sees."""
        run_all(self._reads)

    def write(self, rounding_key: RoundingKey) -> None:
        """Write the results of the optimizer back, and tell autograd of the weights."""
        run_all(self._writes)
        torch.autograd.graph.increment_version(self._weights)


def _row(piece: Piece, grad: int | None = None, gradient: Tensor | None = None, *, is_read: bool = True) -> TableRow:
    """Return the row that reads or writes a piece. For the gradient: its index, and the tensor that is copied."""
    held, segment = piece.held.for_kernels(piece.segment, name_id(piece.name)), piece.segment
    assert held is not None, "the kernels can move it"
    held = held if gradient is None else held._replace(tensor=gradient)
    room = None if piece.at is None else piece.at * FP32.itemsize
    return row_of_move(held, segment.offset, piece.x, segment.first or 0, is_read=is_read, grad=grad, room=room)


def row_back(piece: Piece, index: int, gradient: Tensor) -> TableRow:
    """Return the row that rounds the copy of a gradient to the gradient itself. index: among all gradients."""
    assert piece.at is not None
    room = piece.at * FP32.itemsize
    row = row_of_move(native.StoredTensor(gradient, native.NEAREST), 0, piece.x, is_read=False, room=room)
    return row._replace(grad=(1, index, 0))


def kernels_that_move(piece: Piece) -> ModuleType | None:
    """Return the kernels that know how a tensor is held, and find it in one piece; None if there are none."""
    held, segment = local(piece.held.tensor), piece.segment
    if segment.by_rows or segment.first is None or segment.first + held.numel() > 2**32:
        return None
    kernels = kernels_for(held)
    return None if kernels is None or piece.held.for_kernels(segment, 0) is None else kernels


class Operators:
    """Plain copies go through torch's foreach kernels; each other tensor reads and writes itself. See `Launches`."""

    def __init__(self, grads: Sequence[Piece], pieces: Sequence[Piece]) -> None:
        self._grads, self._pieces = grads, pieces
        self._copied = [piece for piece in pieces if _is_copied(piece.held)]
        self._others = [piece for piece in pieces if not _is_copied(piece.held)]

    def read(self, grads: Sequence[Tensor]) -> None:
        """Fill the tensors that the optimizer sees. grads: the gradients to copy, as this rank holds them."""
        copied = [*self._grads, *self._copied]
        if copied:
            held = [*grads, *(piece.held.tensor for piece in self._copied)]
            of = [piece.segment.of(tensor) for piece, tensor in zip(copied, held, strict=True)]
            copy_all([piece.x for piece in copied], of)
        for piece in self._others:
            piece.held.read(piece.segment, piece.x)

    def write(self, rounding_key: RoundingKey) -> None:
        """Write the results of the optimizer back."""
        for piece in self._pieces:
            piece.held.write(piece.segment, piece.x, piece.name, rounding_key)
        rounding_key.flush()


def _is_copied(held: Held) -> bool:
    return type(held).read is Held.read
