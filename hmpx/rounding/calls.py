"""Work for the kernels, as rows of a table: rounding, moves to FP32 and back, steps of optimizers.

`kernels` is the module whose kernels do the work, `native` or `triton`; both give the same bits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import ModuleType

import torch

from hmpx.rounding import native
from hmpx.rounding.kinds import BF16, CODES, FP32, KERNELS, SPLIT8
from hmpx.rounding.native import StepArguments, StoredTensor
from hmpx.rounding.table import EVEN, WORDS_OF_A_MOVE, Lain, Table, TableRow, run_all

_DRAWN = BF16, SPLIT8, *CODES  # kinds whose writes need random numbers


def launch_once(
    kernels: ModuleType,
    rows: Sequence[TableRow],
    kernel: str = "move_list",
    step_key: int | None = None,
    *constants: int,
) -> None:
    """Launch a kernel on rows of one device that are needed only once."""
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
    width = width or x.numel()
    lain = Lain(x.numel(), offset, width, stride, min(width, x.numel()))
    return TableRow(lain, (StoredTensor(x, FP32), StoredTensor(out, BF16)), (None, key))


def row_of_move(
    held: StoredTensor,
    x: torch.Tensor,
    first: int = 0,
    *,
    is_read: bool,
    grad: int | None = None,
    room: int | None = None,
) -> TableRow:
    """Return the row that reads a held tensor into FP32 `x`, or writes it from `x` by its step's key.

    Args:
        first: the index in the whole parameter of the first element of `held`, if `held` is a part of it.
        grad: the index of `held` among all gradients, if it is one: each step has its gradients at other addresses.
        room: where in a room `x` begins, in bytes, if `x` lies in one.
    """
    size, own = x.numel(), StoredTensor(x, FP32)
    lain = Lain(size, first, size, 0, held.row or size)
    in_room = None if room is None else (int(is_read), room)
    if not is_read:
        return TableRow(lain, (own, held), (None, _drawn(held)), by_name=True, room=in_room)
    of_grad = None if grad is None else (0, grad)
    return TableRow(lain, (held, own), (None, None), grad=of_grad, room=in_room)


def _drawn(held: StoredTensor | None) -> int | None:
    """Return the name from which a tensor's random numbers come; None if writing it needs none."""
    return held.name if held is not None and held.kind in _DRAWN else None


def row_of_step(one: StepArguments, grad: int | None = None) -> TableRow:
    """Return the row that steps a parameter; `grad`: the index of its gradient, if each step has another one."""
    size, held = one.weight.tensor.numel(), one.tensors()
    lain = Lain(size, one.first, size, 0, one.row)
    drawn = tuple(map(_drawn, held))
    return TableRow(lain, held, drawn, by_name=True, scalars=one.scalars, grad=None if grad is None else (1, grad))


def step_list(kernels: ModuleType, kernel: str, stepped: Sequence[StepArguments], step_key: int) -> None:
    """Step all of these parameters, which are on one device, in place by one of `KERNELS`."""
    launch_once(kernels, list(map(row_of_step, stepped)), "step_list", step_key, KERNELS.index(kernel))
