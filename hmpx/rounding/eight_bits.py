"""Optimizer state in 8 bits: small floating-point numbers, and one scale for each block of elements.

**The code.** A block is up to `BLOCK` elements that follow one another. Its scale is a power of two, in BF16, whose
sign says which of two codes the block has. Both are floating-point numbers with 4 bits of mantissa::

    scale > 0   nowhere negative   4 bits of exponent, top = 15: the least number is 2^-18 of the scale
    scale < 0   signed             1 bit of sign, 3 of exponent, top = 7: 2^-10 of the scale

    exponent e, mantissa m         (1 + m/16) * 2^(e - top) * |scale|;  m/16 * 2^(1 - top) * |scale| where e = 0
    e = top, m = 14 and 15         inf and NaN, so 1.8125 * |scale| is the largest number

The scale is the smallest one from 2^-126 to 2^126 that holds the largest finite number of the block. (Numbers past
1.8125 * 2^126 become that.)

**The rounding** is stochastic, by the number r of an element that `stochastic.py` specifies, of 16 bits::

    y            |x| / |scale|, exact
    m, e         (bits(y) + 8 r + 4) >> 19, less the exponent of the code's zero
    e = 0        (y * 2^(top + 22), rounded to an integer, ties to even, + 8 r + 4) >> 19

so a number below the least one of a signed block becomes that or 0, with a probability that keeps the mean. In a
block that is nowhere negative, a positive number never becomes 0: it is the least number at least. What the code can
hold, zero included, stays itself. A number has 5 significant bits, so FP32 holds it exactly, and BF16 from 2^-129 on.

Were a second moment rounded to 0 under a first one that is not, Adam would divide by eps alone. The least second
moment has a root of 2^-9 of the block's, and the least first moment is 2^-10 of the block's, so that an update stays of
the size of the learning rate. The limit: where gradients are less than about 2^-9 (1/500) of the largest of their
block, the second moment is larger than it should be, and their updates are smaller than with FP32 state.

Measured with the transformer of ``examples/charlm.py`` (400 steps, three seeds): the validation loss less that with
FP32 state, in thousandths. To nearest, small numbers become 0 for good; linear codes have too few small numbers::

                                  AdamW   Lion  RMSprop  Adagrad  AdEMAMix
    this code                      -0.5   -1.5     -0.5     -0.2      -0.5
    linear int8                    -4.0   -0.1     -2.1     -0.8       NaN
    companded, FlashOptim's        -6.3   +3.7     -0.6     -0.2     +15.3
    4 and 5 bits of exponent       -1.8   -4.6     -1.3     -1.2      -1.9

Muon brings all singular values of its momentum to one size, so the noise of 4 bits is as large in the update as the
small ones. Its loss was 2.3645 with FP32 state, 2.3694 in 8 bits, and 2.3641 with the momentum in BF16, which is why
that is what `state_dtype="8bit"` does.

What only grows, such as the maximum of amsgrad, keeps what was rounded up: by 3000 steps on noise it is 11 % larger.
RMSprop with `centered` takes the root of a difference of two moments, which rounding can make negative: with gradients
of mean 1 and standard deviation 0.05, 1.8 % of the weights were NaN after 100 steps, and none with BF16 or FP32 state.

Sources: blocks with a scale each are those of Dettmers et al., "8-bit optimizers via block-wise quantization" (ICLR
2022), scales that are powers of two those of the "OCP Microscaling formats" specification (2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from hmpx.rounding import native
from hmpx.rounding.blocks import BLOCK, BlockCodes, Rows
from hmpx.rounding.devices import is_on_host, reinterpreted, shifted
from hmpx.rounding.kernels import kernels_for
from hmpx.rounding.keys import Keys, Span, derive_key
from hmpx.rounding.stochastic import numbers_of

Tensor = torch.Tensor

_CHUNK = 1 << 15  # elements that are looked at at a time, for the sake of the temporaries
_SHEETS = 2  # on an accelerator, where a call costs more than its elements: parts of a tensor
_LEAST, _MOST = 1, 253  # exponents of scales: their inverses are normal numbers, too
_SHIFT = 23 - 4  # bits of an FP32 mantissa that a code has not


class _Sheet(NamedTuple):
    """Elements `start` ... `stop - 1`: a rectangle, and the rectangle of scales over its blocks."""

    start: int
    stop: int
    width: int
    rows: slice
    blocks: slice
    padding: tuple[int, int]  # to whole blocks, at both ends of a row

    def in_blocks(self, x: Tensor, origin: int) -> Tensor:
        """Return this rectangle of `x`, whose first element is `origin`, as [blocks, BLOCK], padded with zeros."""
        held = x[self.start - origin : self.stop - origin].view(-1, self.width)
        return (pad(held, self.padding) if any(self.padding) else held).reshape(-1, BLOCK)

    def out_of_blocks(self, blocks: Tensor) -> Tensor:
        """Undo `in_blocks`; the result is flat."""
        rows = blocks.view(-1, self.width + sum(self.padding))
        return rows[:, self.padding[0] : self.padding[0] + self.width].reshape(-1)


def _sheets(start: int, x: Tensor, rows: Rows) -> Iterator[_Sheet]:
    """Yield rectangles of the elements of `x`, which begin at element `start` of what is held, in whole blocks."""
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


def largest(x: Tensor, rows: Rows, start: int) -> tuple[Tensor, Tensor]:
    """Return for each block the bits of its largest finite magnitude, and whether it has a negative number; flat int32.

    x: FP32 and flat, the elements from `start` on. Where other ranks hold a part of a block, only the own part counts;
    blocks between two rows that are held get 0.
    """
    if not x.numel():
        return (torch.zeros(0, dtype=torch.int32, device=x.device),) * 2
    found = rows.range(start, start + x.numel())
    above, below = start // rows.width, -(-(start + x.numel()) // rows.width)
    magnitudes = torch.zeros(below - above, rows.blocks, dtype=torch.int32, device=x.device)
    negatives = torch.zeros_like(magnitudes)
    for sheet in _sheets(start, x, rows):
        blocks = sheet.in_blocks(x, start)
        bits = reinterpreted(blocks, torch.int32) & 0x7FFFFFFF
        here = slice(sheet.rows.start - above, sheet.rows.stop - above), sheet.blocks
        shape = magnitudes[here].shape
        magnitudes[here] = torch.where(bits < 0x7F800000, bits, 0).amax(1).view(shape)
        negatives[here] = (blocks < 0).any(1).to(torch.int32).view(shape)
    told = slice(found.start - above * rows.blocks, found.stop - above * rows.blocks)
    return magnitudes.view(-1)[told], negatives.view(-1)[told]


def scales_for(magnitudes: Tensor, negatives: Tensor) -> Tensor:
    """Return the BF16 scales of blocks, from the result of `largest`."""
    exponents = shifted(magnitudes + 0x17FFFF, 23).clamp(_LEAST, _MOST)  # the next one where 1.8125 is passed
    return reinterpreted((exponents * 0x80 - negatives * 0x8000).to(torch.int16), torch.bfloat16)


def _kernels(held: BlockCodes, x: Tensor) -> ModuleType | None:
    """Return the kernels that can move codes from or to FP32 `x`; None if there are none, or no elements."""
    if not x.numel() or not native.is_plain(held.scales) or held.scales.device != x.device:
        return None  # scales have a shape of their own
    return kernels_for(held.codes, x)


def encode(held: BlockCodes, x: Tensor, spans: Sequence[Span], keys: Keys, given: bool = False) -> None:
    """Write FP32 `x`, flat, rounded stochastically.

    Args:
        spans, keys: what the random numbers of the elements of `x` depend on.
        given: whether the scales are there; else those of these elements are written.
    """
    codes, scales, rows, start = held
    kernels = _kernels(held, x)
    if kernels is not None and all(span.has_one_key for span in spans):
        kernels.encode_8bit(held, x, spans, derive_key(*keys), given)
        return
    if not x.numel():
        return
    if not given:
        scales.view(-1)[rows.range(start, start + x.numel())] = scales_for(*largest(x, rows, start))
    numbers = numbers_of(x, spans, keys)
    for sheet in _sheets(start, x, rows):
        scale = scales.view(-1, rows.blocks)[sheet.rows, sheet.blocks].reshape(-1, 1)
        values, r = (sheet.in_blocks(each, start) for each in (x, numbers))
        signed, magnitude = scale < 0, values.abs()
        top = _top(signed)
        y = torch.where(magnitude < math.inf, magnitude, 0) * (1 / scale.float().abs())
        normal = reinterpreted(y, torch.int32) - (127 - top) * 0x800000
        below = reinterpreted(y + _power_of_two(1 - top), torch.int32) - (128 - top) * 0x800000  # an ulp is 1 there
        code = shifted(torch.maximum(below, normal) + (r * 8 + 4), _SHIFT)
        code = torch.where(signed | (magnitude == 0), code, code.clamp(min=1))
        code = torch.minimum(code, top * 16 + 13)
        code = torch.where(magnitude == math.inf, top * 16 + 14, torch.where(values.isnan(), top * 16 + 15, code))
        code = torch.where(values < 0, code + 0x80, code)
        codes[sheet.start - start : sheet.stop - start] = sheet.out_of_blocks(code).to(torch.uint8)


def decode(out: Tensor, held: BlockCodes) -> None:
    """Write the numbers to flat FP32 `out`."""
    codes, scales, rows, start = held
    kernels = _kernels(held, out)
    if kernels is not None:
        kernels.decode_8bit(held, out)
        return
    for sheet in _sheets(start, out, rows):
        scale = scales.view(-1, rows.blocks)[sheet.rows, sheet.blocks].reshape(-1, 1)
        code = sheet.in_blocks(codes, start).to(torch.int32)
        signed = scale < 0
        top = _top(signed)
        magnitude = torch.where(signed, code & 0x7F, code)
        bits = magnitude * (1 << _SHIFT) + (127 - top) * 0x800000
        below = reinterpreted(bits + 0x800000, torch.float32) - _power_of_two(1 - top)
        y = torch.where(magnitude < 16, below, reinterpreted(bits, torch.float32))
        y = torch.where(magnitude == top * 16 + 14, math.inf, torch.where(magnitude == top * 16 + 15, math.nan, y))
        y = y * scale.float().abs()
        y = torch.where(signed & (code >= 0x80), -y, y)
        out[sheet.start - start : sheet.stop - start] = sheet.out_of_blocks(y)


def _top(signed: Tensor) -> Tensor:
    """Return the largest exponent of a block's code, int32."""
    return 15 - 8 * signed.to(torch.int32)


def _power_of_two(exponents: Tensor) -> Tensor:
    return reinterpreted((exponents + 127) * 0x800000, torch.float32)
