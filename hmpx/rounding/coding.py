"""How optimizer state becomes codes of a few bits, and numbers again, in eager torch on any device.

A subclass of `StateCode` says which numbers its codes mean. Its methods get whole blocks, [blocks, BLOCK], and one
scale for each. `encode` and `decode` find these blocks in a tensor of which this process may hold a part. If kernels
can move the tensor, they do it instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import pad

from hmpx.rounding.calls import launch_once
from hmpx.rounding.devices import is_on_host, kernels_for, reinterpreted
from hmpx.rounding.keys import Keys, Span, derive_key
from hmpx.rounding.native import FP32, StoredTensor, is_plain
from hmpx.rounding.stochastic import random_numbers
from hmpx.rounding.table import Lain, TableRow

Tensor = torch.Tensor
CodeName = Literal["8bit", "fp8", "4bit"]

BLOCK = 128  # elements
_CHUNK = 1 << 15  # elements of a sheet on a CPU: so temporaries stay small
_SHEETS = 2  # an accelerator has so many sheets of a large tensor, since a call there costs more than its elements
_INFINITY = 0x7F800000  # the bits of inf in FP32


class Rows(NamedTuple):
    """The layout of elements in blocks. Blocks lie in rows, and this process may hold a part of each row.

    Attributes:
        width: how many elements of a row this process holds.
        first: the column in the whole row of the first of them.
        blocks: how many blocks a whole row has.
    """

    width: int
    first: int
    blocks: int

    @classmethod
    def of(cls, length: int) -> Rows:
        """Return the layout of whole rows of `length` elements."""
        return cls(length, 0, -(-length // BLOCK))

    def floor(self, element: int) -> int:
        """Return the first held element of an element's block. Elements are counted in the held rows."""
        if not self.width:
            return 0
        row, column = divmod(element, self.width)
        begin = (self.first + column) // BLOCK * BLOCK - self.first
        return row * self.width + max(begin, 0)

    def range(self, start: int, stop: int) -> slice:
        """Return the blocks from that of element `start` to that of `stop - 1`. Blocks are counted in whole rows."""
        blocks = (
            element // self.width * self.blocks + (self.first + element % self.width) // BLOCK
            for element in (start, stop - 1)
        )
        first, last = blocks
        return slice(first, last + 1)


class BlockCodes(NamedTuple):
    """Numbers in a few bits. Codes begin with element `start` of the held rows; scales are those of all held rows.

    codes: flat uint8. A byte is one code of 8 bits, or two of 4 bits, the first in the upper half. scales: BF16.
    """

    codes: Tensor
    scales: Tensor
    rows: Rows
    start: int = 0


class _Sheet(NamedTuple):
    """A rectangle of elements: `start` ... `stop - 1`, in `rows` of `width`. `rows` and `blocks` index its scales."""

    start: int
    stop: int
    width: int
    rows: slice
    blocks: slice
    padding: tuple[int, int]  # elements that its blocks lack at both ends of a row

    def in_blocks(self, x: Tensor, origin: int) -> Tensor:
        """Return this rectangle of `x`, whose first element is `origin`, as [blocks, BLOCK], padded with zeros."""
        held = x[self.start - origin : self.stop - origin].view(-1, self.width)
        return (pad(held, self.padding) if any(self.padding) else held).reshape(-1, BLOCK)

    def out_of_blocks(self, blocks: Tensor) -> Tensor:
        """Undo `in_blocks`; the result is flat."""
        rows = blocks.view(-1, self.width + sum(self.padding))
        return rows[:, self.padding[0] : self.padding[0] + self.width].reshape(-1)


def _sheets(start: int, x: Tensor, rows: Rows) -> Iterator[_Sheet]:
    """Cut `x`, which begins at element `start` of the held rows, into rectangles of whole blocks, as far as held."""
    stop = start + x.numel()
    chunk = _CHUNK if is_on_host(x) else max(x.numel() // _SHEETS, _CHUNK)
    while start < stop:
        row, column = divmod(start, rows.width)
        count = (stop - start) // rows.width if not column else 0
        width = rows.width if count else min(rows.width - column, stop - start)
        if width > chunk:
            width = rows.floor(start + chunk) - start
        left, right = (rows.first + column) % BLOCK, -(rows.first + column + width) % BLOCK
        count = max(min(count, chunk // (left + width + right)), 1) if width == rows.width else 1
        block = (rows.first + column) // BLOCK
        blocks = slice(block, block + (left + width + right) // BLOCK)
        yield _Sheet(start, start + count * width, width, slice(row, row + count), blocks, (left, right))
        start += count * width


class StateCode(ABC):
    """A code of a few bits for the elements of a block, which share a scale.

    Attributes:
        name: the value of `state_dtype` that asks for this code.
        kind: the number by which kernels know this code.
        zero: a byte of codes and a scale that together mean 0.
        prefix: this and the optimizer's own key of a state tensor are the key of its codes.
        bits: how many bits an element takes: 8 or 4.
        is_stable: whether numbers stay as they are in a second rounding, with the scale that their block then gets.
        has_infinity: whether a single element can be inf or NaN. If so, the scale depends on the finite ones alone.
    """

    name: CodeName
    kind: int
    zero: tuple[int, float] = 0, 1.0
    prefix: str
    bits: int = 8
    is_stable: bool = True
    has_infinity: bool = True

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @abstractmethod
    def scales_for(self, magnitudes: Tensor, not_positive: Tensor) -> Tensor:
        """Return the BF16 scales of blocks, from the result of `largest`."""

    @abstractmethod
    def codes_of(self, values: Tensor, r: Tensor, scale: Tensor) -> Tensor:
        """Return the codes of FP32 values, [blocks, BLOCK], int32.

        Args:
            r: a random number of 16 bits for each value, int32.
            scale: the scale of each block, BF16, [blocks, 1].
        """

    @abstractmethod
    def numbers_of(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the FP32 numbers of int32 codes. For numbers that the code has, this is the inverse of `codes_of`."""

    def largest(self, x: Tensor, rows: Rows, start: int) -> tuple[Tensor, Tensor]:
        """Return two flat int32 tensors with one number for each block.

        The first has the bits of the block's largest magnitude; with `has_infinity`, of its largest finite one. The
        second has 1 more than the bits of the largest magnitude among its numbers <= 0, or 0 if it has none. If other
        ranks hold a part of a block, this rank's part alone counts. Blocks of which it holds nothing get 0.

        x: elements of the held rows from `start` on, FP32 and flat.
        """
        if not x.numel():
            return (torch.zeros(0, dtype=torch.int32, device=x.device),) * 2
        found = rows.range(start, start + x.numel())
        above, below = start // rows.width, -(-(start + x.numel()) // rows.width)
        magnitudes = torch.zeros(below - above, rows.blocks, dtype=torch.int32, device=x.device)
        not_positive = torch.zeros_like(magnitudes)
        for sheet in _sheets(start, x, rows):
            blocks = sheet.in_blocks(x, start)
            bits = reinterpreted(blocks, torch.int32) & 0x7FFFFFFF
            here = slice(sheet.rows.start - above, sheet.rows.stop - above), sheet.blocks
            shape = magnitudes[here].shape
            counted = torch.where(bits < _INFINITY, bits, 0) if self.has_infinity else bits
            magnitudes[here] = counted.amax(1).view(shape)
            not_positive[here] = torch.where(sheet.in_blocks(x <= 0, start), bits + 1, 0).amax(1).view(shape)
        told = slice(found.start - above * rows.blocks, found.stop - above * rows.blocks)
        return magnitudes.view(-1)[told], not_positive.view(-1)[told]

    def encode(self, held: BlockCodes, x: Tensor, spans: Sequence[Span], keys: Keys, given: bool = False) -> None:
        """Round flat FP32 `x` stochastically, and write its codes.

        Args:
            spans, keys: the random numbers of the elements of `x` depend on these.
            given: whether the scales are there already. If not, the scales of the blocks of `x` are written, too.
        """
        codes, scales, rows, start = held
        if not x.numel():
            return
        kernels = self._kernels(held, x)
        parts = [part for span in spans for part in span.within_keys()]
        if kernels is not None and len(parts) == len(spans):  # a cut between keys may be inside of a block
            launch_once(kernels, [self._row(held, x, p, derive_key(*keys, p.offset >> 32), given) for p in parts])
            return
        if not given:
            scales.view(-1)[rows.range(start, start + x.numel())] = self.scales_for(*self.largest(x, rows, start))
        numbers, per_byte = random_numbers(x, spans, keys), self.per_byte
        for sheet in _sheets(start, x, rows):
            scale = scales.view(-1, rows.blocks)[sheet.rows, sheet.blocks].reshape(-1, 1)
            values, r = (sheet.in_blocks(each, start) for each in (x, numbers))
            code = sheet.out_of_blocks(self.codes_of(values, r, scale)).to(torch.uint8)
            if per_byte == 2:
                code = code[::2] * 16 + code[1::2]
            codes[(sheet.start - start) // per_byte : (sheet.stop - start) // per_byte] = code

    def decode(self, out: Tensor, held: BlockCodes) -> None:
        """Write the numbers that the codes mean to flat FP32 `out`."""
        codes, scales, rows, start = held
        kernels = self._kernels(held, out)
        if kernels is not None:
            launch_once(kernels, [self._row(held, out, Span(0, out.numel(), 0, out.numel(), 0))])
            return
        per_byte = self.per_byte
        for sheet in _sheets(start, out, rows):
            scale = scales.view(-1, rows.blocks)[sheet.rows, sheet.blocks].reshape(-1, 1)
            code = codes[(sheet.start - start) // per_byte : (sheet.stop - start) // per_byte].to(torch.int32)
            if per_byte == 2:
                code = torch.stack((code // 16, code % 16), 1).view(-1)
            y = self.numbers_of(sheet.in_blocks(code, sheet.start), scale)
            out[sheet.start - start : sheet.stop - start] = sheet.out_of_blocks(y)

    def _row(self, held: BlockCodes, x: Tensor, span: Span, key: int | None = None, given: bool = False) -> TableRow:
        """Return the table row that writes a span of FP32 `x` in codes; without a key, that reads it from codes."""
        (row, column, blocks), (first, last, offset, width, stride) = held.rows, span
        lain = Lain(last - first, offset % 2**32, width, stride, row, blocks, held.start + first, column)
        codes = held.codes[first // self.per_byte : last // self.per_byte]
        coded = StoredTensor(codes, -self.kind if given else self.kind, beside=held.scales)
        tensors = coded, StoredTensor(x[first:last], FP32)
        return TableRow(lain, tensors if key is None else tensors[::-1], (None, key))

    def _kernels(self, held: BlockCodes, x: Tensor) -> ModuleType | None:
        """Return the kernels that can move these codes from or to FP32 `x`; None if there are none, or no elements."""
        if not x.numel() or not is_plain(held.scales) or held.scales.device != x.device:
            return None  # `kernels_for` wants equal shapes, so it cannot check the scales
        kernels = kernels_for(x)
        return kernels if kernels is not None and kernels.can_read(held.codes) else None
