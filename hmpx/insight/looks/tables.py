"""Tables of positions that were rounded when they were made, whenever that was: in a first forward pass, in a file.

Above 256 not every whole number is one of BF16, so neighbours in a table of BF16 positions are the same, and so are
their angles and sines. A table whose neighbours are equal exactly where those of BF16 (or FP16) positions are was made
of these, whatever was computed of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.containers import tensors_in
from hmpx.base.dtype_names import dtype_name
from hmpx.base.torch_private import base_of
from hmpx.insight.capture.dispatch import Look
from hmpx.insight.capture.notes import Notes, OpCall
from hmpx.insight.finding import Names, Problem
from hmpx.insight.tensors import EXACT_UP_TO, LOW, Tensor, memory

_ENOUGH = 64  # neighbours that are as those of rounded positions by no accident
_COLUMNS = 64  # that are looked at, at most
_STARTS = (0, 1, 2)  # numbers that positions count from
_DTYPES = frozenset({*LOW, torch.float32})


class PositionTables(Look):
    """Looks at the tensors that an iteration reads and has not made."""

    stages = ("forward",)

    def __init__(self) -> None:
        self._iteration = 0
        self._made = set[int]()  # addresses
        self._asked: dict[int, StorageWeakRef] = {}

    def see(self, notes: Notes, op: OpCall) -> None:
        if notes.iteration != self._iteration:
            self._iteration = notes.iteration
            self._made.clear()
        if op.is_view:
            return
        for each in op.given:
            whole = base_of(each) if each.dim() else None
            table = each if whole is None or whole.dtype is not each.dtype else whole
            count = next((n for n in table.shape if n > 1), 1)
            if count > EXACT_UP_TO[torch.bfloat16] + _ENOUGH and not table.requires_grad and table.dtype in _DTYPES:
                self._ask(notes, op, table, each, count)
        self._made.update(memory(each) for each in op.results if each.dtype in _DTYPES)

    def _ask(self, notes: Notes, op: OpCall, table: Tensor, read: Tensor, count: int) -> None:
        at = memory(table)
        known = self._asked.get(at)
        if at in self._made or (known is not None and not known.expired()):
            return
        places = [int(t.max()) for t in tensors_in(op.args) if t.dtype in (torch.int64, torch.int32) and t.numel()]
        end = read.storage_offset() + sum((n - 1) * step for n, step in zip(read.shape, read.stride(), strict=True))
        last = max(places) if places else end * count // table.numel()  # the last row that is read
        for dtype in LOW:
            exact = EXACT_UP_TO[dtype]
            if count <= exact + _ENOUGH or last <= exact:
                continue  # rows that are read are exact
            self._asked[at] = StorageWeakRef(table.untyped_storage())
            rows = table.reshape(count, -1)[: 2 * exact, :_COLUMNS]
            same = rows[1:] == rows[:-1]
            same = torch.cat([same, same.all(1, keepdim=True)], 1)  # in one column, or in all together
            for start in _STARTS:
                alike = _alike(dtype, start, len(rows)).to(same.device)
                if bool((same == alike[:, None]).all(0).any()):
                    said = f"{int(alike.sum())} of {len(rows)} rows of a table are the same as the one before, as "
                    notes.note("table", op, f"{said}positions in {dtype_name(dtype)} are")

    def findings(self, notes: Notes, names: Names) -> Iterator[Problem]:
        for spot in notes.spots("table") if not notes.spots("integers") else ():  # which names where it is made
            said = f"positions in low precision ({spot.said}; it is read here)"
            do = "make the table of positions in float32 or in an integer dtype, outside of autocast"
            yield Problem("integers", True, said + spot.place.within, spot.advice(do), spot.where, (), (), 0.65)


@functools.cache
def _alike(dtype: torch.dtype, start: int, count: int) -> Tensor:
    """Return which of some positions are equal to the one before, once they are rounded."""
    positions = torch.arange(start, start + count).to(dtype)
    return positions[1:] == positions[:-1]
