"""What the kernels are asked for, as rows of a table: rounding, codes, moves to FP32 and back, steps of optimizers.

Each function takes the kernels by which it is done, `native` or `triton`; both give the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.blocks import BlockCodes
from hmpx.rounding.keys import Span, key_of, name_id
from hmpx.rounding.native import BF16, CODED, FOUR, FP8, FP32, KERNELS, SPLIT8, Rounding, StepArguments, StoredTensor
from hmpx.rounding.table import EVEN, WORDS_OF_A_MOVE, Lain, Table, TableRow, run_all

_CODED = CODED, FP8, FOUR
_DRAWN = {BF16, SPLIT8, *_CODED}  # kinds that are written by random numbers


def launch_once(kernels: ModuleType, rows: Sequence[TableRow]) -> None:
    """Move what is moved but once, on one device."""
    if kernels is native:
        words = array("Q")
        for row in rows:
            words.extend(row.words(0, row.lain.words(EVEN)) if row.lain.size else ())
        native.start("move_list", words.buffer_info()[0], len(words) // WORDS_OF_A_MOVE)
        return
    device = next((held.tensor.device for row in rows for held in row.tensors if held is not None), None)
    if device is not None:
        table = Table(device, kernels)
        launches = table.add("move_list", rows)
        if launches:
            table.send()
        run_all(launches)


def _move(lain: Lain, source: StoredTensor, target: StoredTensor, key: int | None = None) -> TableRow:
    return TableRow(lain, (source, target), (None, key))


def round_list(kernels: ModuleType, roundings: Sequence[Rounding], step_key: int) -> None:
    """Round all of them, which are on one device, in one call. step_key: of the seed and the step."""
    rows = []
    for out, x, name, offset, width, stride in roundings:
        lain = Lain.in_rows(x.numel(), offset & 0xFFFFFFFF, width or x.numel(), stride)
        key = key_of(step_key, name_id(name), offset >> 32)
        rows.append(_move(lain, StoredTensor(x, FP32), StoredTensor(out, BF16), key))
    launch_once(kernels, rows)


def encode_codes(
    kernels: ModuleType, kind: int, held: BlockCodes, x: torch.Tensor, spans: Sequence[Span], key: int, given: bool
) -> None:
    """Do what `StateCode.encode` does, to tensors with elements, whose spans have one key."""
    codes, scales, (row, column, whole), start = held
    rows, each = [], 2 if kind == FOUR else 1
    for first, last, offset, width, stride in spans:
        lain = Lain(last - first, offset, width, stride, row, whole, start + first, column)
        part = StoredTensor(codes[first // each : last // each], -kind if given else kind, beside=scales)
        rows.append(_move(lain, StoredTensor(x[first:last], FP32), part, key))
    launch_once(kernels, rows)


def decode_codes(kernels: ModuleType, kind: int, held: BlockCodes, out: torch.Tensor) -> None:
    """Do what `StateCode.decode` does, to tensors with elements."""
    codes, scales, (row, column, whole), start = held
    count = out.numel()
    lain = Lain(count, 0, count, 0, row, whole, start, column)
    launch_once(kernels, [_move(lain, StoredTensor(codes, kind, beside=scales), StoredTensor(out, FP32))])


class Move(NamedTuple):
    """`size` elements of a tensor from `start` on, where in codes a block begins; in FP32 at `x`.

    Attributes:
        first: the index of the tensor's first element in the whole parameter, where it is a part of one.
        grad: its index among all gradients, if it is one, which has another address in each step.
        room: how far behind the address of a room `x` is, in bytes, if it lies in one.
    """

    held: StoredTensor
    start: int
    size: int
    x: torch.Tensor
    first: int = 0
    grad: int | None = None
    room: int | None = None

    def of(self, tensor: torch.Tensor) -> Move:
        """Return the same elements of another tensor that is held in the same way."""
        return self._replace(held=self.held._replace(tensor=tensor))

    def _lain(self) -> Lain:
        if self.held.row:
            return Lain.alone(self.size, self.held.row, self.start, self.first)
        return Lain.alone(self.size, self.size, offset=self.first + self.start)  # there are no blocks to go by

    def _part(self) -> StoredTensor:
        """Return these elements alone; scales of codes stay those of the whole tensor."""
        held, own = self.held, slice(self.start, self.start + self.size)
        if self.size == held.size:
            return held
        beside = held.beside if held.beside is None or held.kind in _CODED else held.beside.view(-1)[own]
        own = slice(own.start // 2, own.stop // 2) if held.kind == FOUR else own
        return held._replace(tensor=held.tensor.view(-1)[own], beside=beside)

    def read(self) -> TableRow:
        """Return the row that reads it to FP32."""
        grad = None if self.grad is None else (0, self.grad, self.start * self.held.tensor.element_size())
        tensors, room = (self._part(), StoredTensor(self.x, FP32)), None if self.room is None else (1, self.room)
        return TableRow(self._lain(), tensors, (None, None), grad=grad, room=room)

    def written(self) -> TableRow:
        """Return the row that writes it back, with the key of a step that is still to come."""
        tensors, room = (StoredTensor(self.x, FP32), self._part()), None if self.room is None else (0, self.room)
        return TableRow(self._lain(), tensors, (None, _drawn(self.held)), by_name=True, room=room)


def _drawn(held: StoredTensor | None) -> int | None:
    """Return the name of a tensor that is written by random numbers."""
    return held.name if held is not None and held.kind in _DRAWN else None


def row_of_step(one: StepArguments, grad: int | None = None) -> TableRow:
    """Return the row that steps a parameter; `grad`: the index of its gradient, if it has another one in each step."""
    lain, held = Lain.alone(one.weight.tensor.numel(), one.row, offset=one.first), one.tensors()
    drawn = tuple(map(_drawn, held))
    return TableRow(lain, held, drawn, by_name=True, scalars=one.scalars, grad=None if grad is None else (1, grad, 0))


def step_list(kernels: ModuleType, kernel: str, stepped: Sequence[StepArguments], step_key: int) -> None:
    """Step all of these parameters, which are on one device, in place by one of `KERNELS`."""
    if stepped:
        table = Table(stepped[0].weight.tensor.device, kernels)
        launches = table.add("step_list", map(row_of_step, stepped), KERNELS.index(kernel))
        if launches:
            table.send(step_key)
        run_all(launches)
