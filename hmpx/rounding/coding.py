"""How optimizer state becomes codes of a few bits, and numbers again, in eager torch on any device.

A subclass of `StateCode` says which numbers its codes mean. Its methods get whole blocks, [blocks, BLOCK], and one
scale for each. `encode` and `decode` find these blocks in a tensor, as its `BlockLayout` says. If kernels can move the
tensor, they do it instead.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hmpx.base.tensors import is_on_host
from hmpx.rounding.devices import kernels_for, reinterpreted
from hmpx.rounding.native import FP32, StoredTensor, is_plain
from hmpx.rounding.shared import CodeName, Keys, Span, derive_key
from hmpx.rounding.stochastic import random_numbers
from hmpx.rounding.table import RowLayout, TableRow, launch_once

Tensor = torch.Tensor

BLOCK = 128  # elements
_CHUNK = 1 << 15  # elements of a sheet on a CPU: so temporaries stay small
_SHEETS = 2  # an accelerator has so many sheets of a large tensor, since a call there costs more than its elements
_INFINITY = 0x7F800000  # the bits of inf in FP32


class BlockLayout(NamedTuple):
    """How the elements of a tensor lie in blocks, each of which has a scale.

    A row is the last dimension. While it is shorter than a block, the dimension before it joins the row, but never the
    first one. Each row begins with a block. So whoever holds whole rows holds whole blocks.

    Attributes:
        row: the elements of a row.
        folded: the first dimension that belongs to a row.
    """

    row: int
    folded: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> BlockLayout:
        folded = max(len(shape) - 1, 0)
        while folded > 1 and math.prod(shape[folded:]) < BLOCK:
            folded -= 1
        return cls(math.prod(shape[folded:]), folded)

    def shapes(self, code: StateCode, shape: Sequence[int]) -> tuple[torch.Size, torch.Size]:
        """Return the shapes of the codes and of the scales of a tensor, or of a part of some of its rows."""
        in_front, codes = tuple(shape[: self.folded]), self.row // code.per_byte
        blocks = -(-self.row // BLOCK)
        return torch.Size(shape if code.per_byte == 1 else (*in_front, codes)), torch.Size((*in_front, blocks))


def _sheets(x: Tensor, row: int) -> Iterator[tuple[slice, slice, int]]:
    """Cut rows into rectangles of whole blocks. Yield the elements of each, its blocks, and its width."""
    size = x.numel()
    chunk = (_CHUNK if is_on_host(x) else max(size // _SHEETS, _CHUNK)) // BLOCK * BLOCK
    blocks = -(-row // BLOCK)
    if row <= chunk:
        count = chunk // (blocks * BLOCK) or 1
        for first in range(0, size // row, count):
            last = min(first + count, size // row)
            yield slice(first * row, last * row), slice(first * blocks, last * blocks), row
        return
    for begin in range(0, size, row):
        for column in range(0, row, chunk):
            width, block = min(chunk, row - column), begin // row * blocks + column // BLOCK
            yield slice(begin + column, begin + column + width), slice(block, block + -(-width // BLOCK)), width


def _in_blocks(x: Tensor, width: int) -> Tensor:
    """Return a rectangle of this width as [blocks, BLOCK], padded with zeros."""
    rows = x.view(-1, width)
    return (pad(rows, (0, -width % BLOCK)) if width % BLOCK else rows).reshape(-1, BLOCK)


def _out_of_blocks(blocks: Tensor, width: int) -> Tensor:
    """Undo `_in_blocks`; the result is flat."""
    return blocks.view(-1, width + -width % BLOCK)[:, :width].reshape(-1)


class StateCode(ABC):
    """A code of a few bits for the elements of a block, which share a scale.

    Attributes:
        name: the value of `state_dtype` that asks for this code.
        words: what its numbers are, for `hmpx.explain`.
        kind: the number by which kernels know this code. None: they do not, and eager torch reads and writes it.
        zero: a byte of codes and a scale that together mean 0.
        prefix: this and the optimizer's own key of a state tensor are the key of its codes.
        bits: how many bits an element takes: 8 or 4.
        is_stable: whether numbers stay as they are in a second rounding, with the scale that their block then gets.
        has_infinity: whether a single element can be inf or NaN. If so, the scale depends on the finite ones alone.
    """

    name: CodeName
    words: str
    kind: int | None = None
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
        """Return the BF16 scales of blocks, from two int32 numbers of each.

        Args:
            magnitudes: the bits of the block's largest magnitude; with `has_infinity`, of its largest finite one.
            not_positive: 1 more than the bits of the largest magnitude among its numbers <= 0; 0 if it has none.
        """

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

    def encode(self, held: StoredTensor, x: Tensor, spans: Sequence[Span], keys: Keys) -> None:
        """Round flat FP32 `x`, which is whole rows, stochastically. Write its codes and scales.

        Args:
            held: flat codes, and scales `beside` them, in rows of `row` elements. A byte is one code of 8 bits, or two
                of 4 bits, the first in the upper half.
            spans, keys: the random numbers of the elements of `x` depend on these. A span has whole rows.
        """
        if not x.numel():
            return
        kernels = self._kernels(held, x)
        if kernels is not None and all([len(list(span.within_keys())) == 1 for span in spans]):
            launch_once(kernels, [self._row(held, x, span, derive_key(*keys, span.offset >> 32)) for span in spans])
            return
        numbers, per_byte, scales = random_numbers(x, spans, keys), self.per_byte, _scales(held)
        for here, blocks, width in _sheets(x, held.row):
            values = _in_blocks(x[here], width)  # [blocks, BLOCK]
            bits = reinterpreted(values, torch.int32) & 0x7FFFFFFF
            finite = torch.where(bits < _INFINITY, bits, 0) if self.has_infinity else bits
            not_positive = torch.where(_in_blocks(x[here] <= 0, width), bits + 1, 0)
            scales[blocks] = scale = self.scales_for(finite.amax(1), not_positive.amax(1))  # [blocks]
            code = self.codes_of(values, _in_blocks(numbers[here], width), scale[:, None])
            code = _out_of_blocks(code, width).to(torch.uint8)  # flat, one code in a byte
            code = code[::2] * 16 + code[1::2] if per_byte == 2 else code
            held.tensor[here.start // per_byte : here.stop // per_byte] = code

    def decode(self, out: Tensor, held: StoredTensor) -> None:
        """Write the numbers that the codes mean to flat FP32 `out`. held: as for `encode`."""
        if not out.numel():
            return
        kernels = self._kernels(held, out)
        if kernels is not None:
            launch_once(kernels, [self._row(held, out, Span(0, out.numel(), 0, out.numel(), 0))])
            return
        per_byte, scales = self.per_byte, _scales(held)
        for here, blocks, width in _sheets(out, held.row):
            code = held.tensor[here.start // per_byte : here.stop // per_byte].to(torch.int32)
            if per_byte == 2:
                code = torch.stack((code // 16, code % 16), 1).view(-1)  # flat again
            y = self.numbers_of(_in_blocks(code, width), scales[blocks, None])
            out[here] = _out_of_blocks(y, width)

    def _row(self, held: StoredTensor, x: Tensor, span: Span, key: int | None = None) -> TableRow:
        """Return the table row that writes a span of FP32 `x` in codes; without a key, that reads it from codes."""
        first, last, offset, width, stride = span
        layout = RowLayout(last - first, offset % 2**32, width, stride, held.row)
        scales = _scales(held)[first // held.row * -(-held.row // BLOCK) :]
        coded = held._replace(tensor=held.tensor[first // self.per_byte : last // self.per_byte], beside=scales)
        tensors = coded, StoredTensor(x[first:last], FP32)
        return TableRow(layout, tensors if key is None else tensors[::-1], (None, key))

    def _kernels(self, held: StoredTensor, x: Tensor) -> ModuleType | None:
        """Return the kernels that can move these codes from or to FP32 `x`; None if there are none."""
        scales = _scales(held)  # `kernels_for` wants equal shapes, so it cannot check these
        if self.kind is None or not is_plain(scales) or scales.device != x.device:
            return None
        kernels = kernels_for(x)
        return kernels if kernels is not None and kernels.can_read(held.tensor) else None


def _scales(held: StoredTensor) -> Tensor:
    assert held.beside is not None, "codes have scales"
    return held.beside.view(-1)
