"""Optimizer state in 4 bits: one of 16 numbers, and one scale for each block of elements.

**The code.** A block is up to `BLOCK` elements that follow one another. Its scale is a BF16 number, whose sign says
which of two lists the block has. A code is a position in it, and means that number times the scale's magnitude::

    scale > 0   all elements are above 0   1/16, 2/16, ... 1
    scale < 0   others                     -.8875 -.6625 -.4375 -.2125 -.0775 -.0325 -.0055
                                           0 .0055 .0325 .0775 .2125 .4375 .6625 .8875 1

Two codes share a byte, the first in the upper half. Rows have a multiple of 16 elements: state of other tensors is in
8 bits (`hmpx.updates.holding.state_tensors`).

The scale is the smallest one, from 2^-126 on, under which no element is past the ends of the list. A negative one
has an odd last bit where no element is negative, else an even one. A block with an inf or a NaN becomes NaN as a whole.

**The rounding** is stochastic, by the number r of an element that `stochastic.py` specifies, of 16 bits::

    y           x / |scale|, rounded to FP32
    low, high   the numbers of the list on both sides of y
    the result  high where (y - low) * 65536 > (r + 1/2) * (high - low), else low

0 stays 0. In a block that is nowhere negative, a positive number never becomes 0: it is the least number above 0 at
least. Were a second moment rounded to 0 under a first one that is not, Adam would divide by eps alone. The limit: where
gradients are less than a fourth of the largest of their block, the second moment is larger than it should be, a
sixteenth of the largest, and their updates are smaller than with FP32 state.

Measured with the transformer of ``examples/charlm.py``, three seeds::

    the part of the gap between FP32 and BF16 to nearest that is closed   4 bits    8 bits
    AdamW, learning rate 3e-4, 400 steps                                  97.2 %   100.0 %
    the same, 1500 steps                                                 100.9 %   100.5 %

    validation loss after 400 steps less that with FP32 state
    AdamW, learning rate 3e-3                                            +0.0012    0.0000
    Lion, 3e-4                                                           -0.0061   -0.0010

The noise of 4 bits makes updates larger where a second moment is small: the network of ``examples/digits.py`` (AdamW,
1e-4, 30 epochs) is at a loss of .92 where FP32 state has 1.14 and 8 bits 1.14; at 1e-3 and 150 epochs both have .09.

Sources: the two lists are those of Li et al., "Memory efficient optimizers with 4-bit states" (NeurIPS 2023); torchao's
`OptimState4bit` reads the same numbers from the same codes and scales. Its scales are FP32, it rounds to nearest, a
tensor has one of the lists as a whole, so that zeros of a second moment become 1/16, and the largest magnitude becomes
1, so that a number near -1 becomes -.8875.
"""

from __future__ import annotations

import functools

import torch

from hmpx.rounding.coding import StateCode
from hmpx.rounding.devices import lacks_data, reinterpreted, shifted
from hmpx.rounding.four_bit_lists import ABOVE_ZERO, SIGNED, STRETCHED
from hmpx.rounding.native import FOUR

Tensor = torch.Tensor

_ZERO = SIGNED.index(0.0)
_LEAST, _MOST, _NAN = 0x0080, 0x7F7F, 0x7FC0  # the bits of scales


class FourBits(StateCode):
    """The code at the head of this file."""

    name, prefix, bits, is_stable, has_infinity = "4bit", "hmpx_4bit_", 4, False, False
    kind, zero = FOUR, (_ZERO * 17, -1.0)

    def scales_for(self, magnitudes: Tensor, not_positive: Tensor) -> Tensor:
        below = reinterpreted((not_positive - 1).clamp(min=0), torch.float32) * STRETCHED
        needed = torch.maximum(magnitudes, reinterpreted(below, torch.int32))
        odd = (not_positive == 1).to(torch.int32)
        signed = shifted(needed + (2 - odd) * 0x10000 - 1, 17).clamp(_LEAST // 2, _MOST // 2) * 2 + odd - 0x8000
        bits = torch.where(not_positive > 0, signed, shifted(needed + 0xFFFF, 16).clamp(_LEAST, _MOST))
        bits = torch.where(magnitudes < 0x7F800000, bits, _NAN)
        return reinterpreted(bits.to(torch.int16), torch.bfloat16)

    def codes_of(self, values: Tensor, r: Tensor, scale: Tensor) -> Tensor:
        y, signed = values / scale.float().abs(), scale < 0
        numbers, gaps = _lists(values)
        above = torch.bucketize(y, numbers[:16], right=True, out_int32=True)
        low = (torch.where(signed, above, (y * 16).to(torch.int32)) - 1).clamp(0, 14)
        at = low + 16 * ~signed
        code = low + ((y - numbers[at]) * 65536 > (r + 0.5) * gaps[at])
        nowhere_negative = signed & (reinterpreted(scale, torch.int16) % 2 != 0)
        code = torch.where(nowhere_negative & (values > 0), code.clamp(min=_ZERO + 1), code)
        return torch.where(scale.isnan(), 0, code)

    def numbers_of(self, codes: Tensor, scale: Tensor) -> Tensor:
        return _lists(scale)[0][codes + 16 * (scale > 0)] * scale.float().abs()


FOUR_BITS = FourBits()


def _lists(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signed list and the other one, in one tensor, and the gaps above their numbers."""
    return _made(like.device) if not lacks_data(like) else _made.__wrapped__(like.device)


@functools.cache
def _made(device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.tensor([*SIGNED, *ABOVE_ZERO], dtype=torch.float32, device=device)
    return both, both.roll(-1) - both
