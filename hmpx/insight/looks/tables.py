"""Tables of positions and data that were rounded before an op reads them: in a first forward pass, in a file.

Above 256 not every whole number is one of BF16, so neighbours in a table of BF16 positions are the same, and so are
their angles and sines. A table whose neighbours are equal exactly where those of BF16 (or FP16) positions are was made
of these, whatever was computed of them. FP32 data that were in low precision have the grid of its numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_name, tensors_in
from hmpx.base.torch_private import base_of
from hmpx.insight.dispatch import Look, few
from hmpx.insight.finding import Finding, Names, percent
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.tensors import EXACT_UP_TO, LOW, Tensor, low_dtype, memory, ulp

_ENOUGH = 64  # neighbours that are as those of rounded positions by no accident
_COLUMNS = 64  # that are looked at, at most
_ROWS = 256  # of data, likewise
_ODD = 0.01  # a share that is no accident
_OFF, _LEAST = 0.29, 0.02  # of a digit: what rounding is off by; and of what data vary by: less harms nothing
_STARTS = (0, 1, 2)  # numbers that positions count from
_DTYPES = frozenset({*LOW, torch.float32})


class PositionTables(Look):
    """Looks at the tensors that an iteration reads and has not made."""

    stages = ("forward",)

    def __init__(self) -> None:
        self._iteration = 0
        self._made = set[int]()  # addresses
        self._asked: dict[int, StorageWeakRef] = {}
        self._grids: dict[int, StorageWeakRef] = {}

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
            if memory(table) not in self._made:
                self._ask_grid(notes, op, table)
            if count > EXACT_UP_TO[torch.bfloat16] + _ENOUGH and not table.requires_grad and table.dtype in _DTYPES:
                self._ask(notes, op, table, each, count)
        if (
            op.name == "_to_copy" and op.given and op.results and op.given[0].dtype in LOW and not op.trains
        ):  # a line of this iteration rounds them
            self._ask_grid(notes, op, op.out)
        self._made.update(memory(each) for each in op.results if each.dtype in _DTYPES)

    def _ask(self, notes: Notes, op: OpCall, table: Tensor, read: Tensor, count: int) -> None:
        at = memory(table)
        if at in self._made or _is_known(self._asked, table):
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

    def _ask_grid(self, notes: Notes, op: OpCall, table: Tensor) -> None:
        """Note data of so few numbers of BF16 or FP16 that their rounding is a part of what they vary by."""
        is_data = table.dtype is torch.float32 and not table.requires_grad and table.numel() >= _ENOUGH
        if not is_data or _is_known(self._grids, table):
            return
        self._grids[memory(table)] = StorageWeakRef(table.untyped_storage())
        if low_dtype(few(table)) is None:
            return
        rows = table.detach().reshape(-1, table.shape[-1] if table.shape[-1] <= _COLUMNS else 1)
        rows = rows[:: max(len(rows) // _ROWS, 1)]
        is_whole = torch.equal(rows, rows.round())
        for dtype in LOW:
            size = ulp(rows, dtype)
            odd = ((rows / size) % 2 == 1).float().mean()  # some of the numbers of a grid are an odd number of steps
            spread = (rows - rows.mean(0)).square().sum().sqrt()
            off = float((_OFF * size).square().sum().sqrt() / spread)
            is_exact = is_whole and float(rows.abs().max()) <= EXACT_UP_TO[dtype]
            if low_dtype(rows) is dtype and not is_exact and odd > _ODD and _LEAST < off < math.inf:
                apart = float(size.median())
                said = f"{dtype_name(dtype)}, where these are {apart:.2g} apart: that is {percent(min(off, 1))} of"
                notes.follow(op, {notes.note("data", op, said)})

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        for spot in notes.spots("data"):
            said = f"float32 data hold numbers of {spot.said} what they vary by"
            said += f"{'' if spot.is_read else '; no gradient depends on it'}{spot.place.within}"
            do = "make and keep them in float32; or subtract what all of them have in common before they are rounded"
            yield Finding("rounded data", spot.is_read, said, spot.advice(do), spot.where, weight=0.5)
        for spot in notes.spots("table") if not notes.spots("integers") else ():  # which names where it is made
            said = f"positions in low precision ({spot.said}; it is read here)"
            do = "make the table of positions in float32 or in an integer dtype, outside of autocast"
            yield Finding("integers", True, said + spot.place.within, spot.advice(do), spot.where, (), (), 0.65)


def _is_known(known: dict[int, StorageWeakRef], table: Tensor) -> bool:
    held = known.get(memory(table))
    return held is not None and not held.expired()


@functools.cache
def _alike(dtype: torch.dtype, start: int, count: int) -> Tensor:
    """Return which of some positions are equal to the one before, once they are rounded."""
    positions = torch.arange(start, start + count).to(dtype)
    return positions[1:] == positions[:-1]
