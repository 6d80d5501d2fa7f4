"""What the kernels are asked for, as rows of a table: rounding, moves to FP32 and back, steps of optimizers.

`kernels` are those by which it is done, `native` or `triton`; both give the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import ModuleType

import torch

from hmpx.rounding import native
from hmpx.rounding.native import BF16, CODED, FOUR, FP8, FP32, KERNELS, SPLIT8, StepArguments, StoredTensor
from hmpx.rounding.table import EVEN, WORDS_OF_A_MOVE, Lain, Table, TableRow, run_all

_DRAWN = BF16, SPLIT8, CODED, FP8, FOUR  # kinds that are written by random numbers


def launch_once(
    kernels: ModuleType,
    rows: Sequence[TableRow],
    kernel: str = "move_list",
    step_key: int | None = None,
    *constants: int,
) -> None:
    """Launch a kernel on rows that are needed but once, on one device."""
    if kernels is native and kernel == "move_list":
        words = array("Q")
        for row in rows:
            words.extend(row.words(0, row.lain.words(EVEN)) if row.lain.size else ())
        native.start("move_list", words.buffer_info()[0], len(words) // WORDS_OF_A_MOVE)
        return
    device = next((held.tensor.device for row in rows for held in row.tensors if held is not None), None)
    if device is not None:
        table = Table(device, kernels)
        launches = table.add(kernel, rows, *constants)
        if launches:
            table.send(step_key)
        run_all(launches)


def row_of_rounding(
    out: torch.Tensor, x: torch.Tensor, key: int, offset: int, width: int = 0, stride: int = 0
) -> TableRow:
    """Return the row that does what `eager.round_` does."""
    lain = Lain.in_rows(x.numel(), offset, width or x.numel(), stride)
    return TableRow(lain, (StoredTensor(x, FP32), StoredTensor(out, BF16)), (None, key))


def row_of_move(
    held: StoredTensor,
    start: int,
    x: torch.Tensor,
    first: int = 0,
    *,
    is_read: bool,
    grad: int | None = None,
    room: int | None = None,
) -> TableRow:
    """Return the row that moves elements of a held tensor to FP32 `x`, or from there by the key of a step to come.

    Args:
        held: the whole tensor.
        start: the index of the first element in it, where in codes a block begins.
        first: the index of the tensor's first element in the whole parameter, where it is a part of one.
        grad: its index among all gradients, if it is one, which has another address in each step.
        room: how far behind the address of a room `x` is, in bytes, if it lies in one.
    """
    size, own = x.numel(), StoredTensor(x, FP32)
    at = start if held.row else 0  # else there are no blocks to go by
    lain = Lain.alone(size, held.row or size, at, first + start - at)
    in_room = None if room is None else (int(is_read), room)
    if not is_read:
        return TableRow(lain, (own, held.part(start, size)), (None, _drawn(held)), by_name=True, room=in_room)
    of_grad = None if grad is None else (0, grad, start * held.tensor.element_size())
    return TableRow(lain, (held.part(start, size), own), (None, None), grad=of_grad, room=in_room)


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
    launch_once(kernels, list(map(row_of_step, stepped)), "step_list", step_key, KERNELS.index(kernel))
