"""The kernels in Triton, as Python calls them: CUDA, one pass over memory, one launch for a list of tensors.

They take what the C kernels take, and round to the same bits. Triton comes with torch's CUDA builds.
``TRITON_INTERPRET=1`` runs the kernels on the CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.blocks import BlockCodes
from hmpx.rounding.keys import Span, key_of, name_id
from hmpx.rounding.native import BF16, CODED, FOUR, FP8, FP32, SPLIT8, Rounding, StepArguments, StoredTensor, is_plain
from hmpx.rounding.table import Lain, Table, TableRow, launch_once, run_all, triton_kernels

KERNELS = native.KERNELS
_CODED = CODED, FP8, FOUR
_DRAWN = {BF16, SPLIT8, *_CODED}  # kinds that are written by random numbers


def available() -> bool:
    """Return whether Triton can be imported."""
    return triton_kernels() is not None


def can_read(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels exist and can read these tensors of equal shape."""
    device, shape = tensors[0].device, tensors[0].shape
    on_one = device.type == "cuda" and all(t.device == device and t.shape == shape for t in tensors)
    return on_one and available() and all(map(is_plain, tensors))


def _move(lain: Lain, source: StoredTensor, target: StoredTensor, key: int | None = None) -> TableRow:
    return TableRow(lain, (source, target), (None, key))


def round_list(roundings: Sequence[Rounding], step_key: int) -> None:
    """Round all of them, which are on one device, in one launch; as `native.round_list`."""
    rows = []
    for out, x, name, offset, width, stride in roundings:
        lain = Lain.in_rows(x.numel(), offset & 0xFFFFFFFF, width or x.numel(), stride)
        key = key_of(step_key, name_id(name), offset >> 32)
        rows.append(_move(lain, StoredTensor(x, FP32), StoredTensor(out, BF16), key))
    launch_once("move_list", rows)


def encode_codes(kind: int, held: BlockCodes, x: torch.Tensor, spans: Sequence[Span], key: int, given: bool) -> None:
    """Do what `native.encode_codes` does."""
    codes, scales, (row, column, whole), start = held
    rows, each = [], 2 if kind == FOUR else 1
    for first, last, offset, width, stride in spans:
        lain = Lain(last - first, offset, width, stride, row, whole, start + first, column)
        part = StoredTensor(codes[first // each : last // each], -kind if given else kind, beside=scales)
        rows.append(_move(lain, StoredTensor(x[first:last], FP32), part, key))
    launch_once("move_list", rows)


def decode_codes(kind: int, held: BlockCodes, out: torch.Tensor) -> None:
    """Do what `native.decode_codes` does."""
    codes, scales, (row, column, whole), start = held
    count = out.numel()
    lain = Lain(count, 0, count, 0, row, whole, start, column)
    launch_once("move_list", [_move(lain, StoredTensor(codes, kind, beside=scales), StoredTensor(out, FP32))])


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
        beside = held.beside if held.beside is None or held.kind in _CODED else held.beside.view(-1)[own]
        own = slice(own.start // 2, own.stop // 2) if held.kind == FOUR else own
        return held._replace(tensor=held.tensor.view(-1)[own], beside=beside)

    def read(self) -> TableRow:
        """Return the row that reads it to FP32."""
        grad = None if self.grad is None else (0, self.grad, self.start * self.held.tensor.element_size())
        row = _move(self._lain(), self._part(), StoredTensor(self.x, FP32))
        return row._replace(grad=grad, room=None if self.room is None else (1, self.room))

    def written(self) -> TableRow:
        """Return the row that writes it back, with the key of a step that is still to come."""
        row = _move(self._lain(), StoredTensor(self.x, FP32), self._part(), _drawn(self.held))
        return row._replace(by_name=True, room=None if self.room is None else (0, self.room))


def _drawn(held: StoredTensor | None) -> int | None:
    """Return the name of a tensor that is written by random numbers."""
    return held.name if held is not None and held.kind in _DRAWN else None


class TableSteps:
    """Parameters on one device that are stepped in place by one of `KERNELS`, many times; see `native.WordSteps`."""

    def __init__(self, kernel: str, stepped: Sequence[StepArguments]) -> None:
        self._table, rows = Table(stepped[0].weight.tensor.device), []
        for i, each in enumerate(stepped):
            lain, held = Lain.alone(each.weight.tensor.numel(), each.row, offset=each.first), each.tensors()
            rows.append(TableRow(lain, held, tuple(map(_drawn, held)), by_name=True, grad=(1, i, 0)))
        self._launches = self._table.add("step_list", rows, KERNELS.index(kernel))

    def takes(self, grads: Sequence[int]) -> bool:
        """Return whether gradients at these addresses, of the same dtypes, can be stepped by the same words."""
        return self._table.takes(grads)

    def run(self, grads: Sequence[int], scalars: Sequence[tuple[float, ...]], step_key: int) -> None:
        """Step all of them. grads: the addresses of their gradients."""
        for launch in self._launches:
            is_all = launch.count == len(scalars)
            self._table.scale(launch, scalars if is_all else [scalars[i] for i in launch.rows])
        if self._launches:
            self._table.send(step_key, grads)
        run_all(self._launches)


def kept_steps(kernel: str, stepped: Sequence[StepArguments]) -> TableSteps:
    """Return what steps these parameters, which are on one device, again and again; as `native.kept_steps`."""
    return TableSteps(kernel, stepped)


def step_list(kernel: str, stepped: Sequence[StepArguments], step_key: int) -> None:
    """Step all of these parameters, which are on one device, in place by one of `KERNELS`; as `native.step_list`."""
    if stepped:
        grads, scalars = [each.grad.tensor.data_ptr() for each in stepped], [each.scalars for each in stepped]
        TableSteps(kernel, stepped).run(grads, scalars, step_key)
