"""Optimizer state in codes of 8 bits and of 4, and one BF16 scale for each block of elements.

A block is up to `BLOCK` elements that follow one another. The sign of its scale says which of two lists of numbers its
codes mean. `stochastic.py` specifies r, the random number of 16 bits by which an element is rounded. The codes of 8
bits are rows of `FLOATS` in `shared.py`. To add another kind of code, derive a class from `StateCode` and name it in
`STATE_CODES`.

If a second moment became 0 and its first moment did not, Adam would divide by eps alone. So in a block that is nowhere
negative, a positive number never becomes 0: it becomes the least positive number of the code, or a larger one.

**"8bit".** The scale is a power of two. Both codes are floating-point numbers with 4 bits of mantissa::

    scale > 0   nowhere negative   4 bits of exponent, top = 15: the least number is 2^-18 of the scale
    scale < 0   signed             1 bit of sign, 3 of exponent, top = 7: 2^-10 of the scale

    exponent e, mantissa m         (1 + m/16) * 2^(e - top) * |scale|;  m/16 * 2^(1 - top) * |scale| where e = 0
    e = top, m = 14 and 15         inf and NaN, so 1.8125 * |scale| is the largest number

The scale is the smallest one from 2^-126 to 2^126 under which the code reaches the largest finite number of the block.
(Larger numbers than 1.8125 * 2^126 become 1.8125 * 2^126.)

The rounding is::

    y            |x| / |scale|, exact
    m, e         (bits(y) + 8 r + 4) >> 19, less the exponent of the code's zero
    e = 0        (y * 2^(top + 22), rounded to an integer, ties to even, + 8 r + 4) >> 19

so a number below the least one of a signed block becomes the least one or 0, with a probability that keeps the mean.
A number that the code has, such as 0, stays itself. It has 5 significant bits, so FP32 holds it exactly, and BF16 does
from 2^-129 on.

The root of the least second moment is 2^-9 of the scale's root, and the least first moment is 2^-10 of the scale. So an
update keeps the size of the learning rate. The limit: where gradients are less than about 2^-9 (1/500) of the
largest of their block, the second moment is larger than it should be, and their updates are smaller than with FP32
state.

Measured with the transformer of ``examples/charlm.py`` (400 steps, three seeds): the validation loss less that with
FP32 state, in thousandths. Rounding to nearest makes small numbers 0 for good. Linear codes have too few of them::

                                  AdamW   Lion  RMSprop  Adagrad  AdEMAMix
    this code                      -0.5   -1.5     -0.5     -0.2      -0.5
    linear int8                    -4.0   -0.1     -2.1     -0.8       NaN
    companded, FlashOptim's        -6.3   +3.7     -0.6     -0.2     +15.3
    4 and 5 bits of exponent       -1.8   -4.6     -1.3     -1.2      -1.9

Muon brings all singular values of its momentum to one size, so the noise of a mantissa of 4 bits becomes as large as
the small singular values. The loss was 2.3645 with FP32 state, 2.3694 in 8 bits, and 2.3641 with the momentum in BF16.
So ``state_dtype="8bit"`` keeps Muon's momentum in BF16.

State that only grows, such as amsgrad's maximum, never loses what was rounded up: after 3000 steps on noise it is 11 %
larger.
RMSprop with `centered` takes the root of a difference of two moments, which rounding can make negative: with gradients
of mean 1 and standard deviation 0.05, 1.8 % of the weights were NaN after 100 steps, and none with BF16 or FP32 state.

**"fp8"** has the numbers of torch's float8_e4m3fn instead, 448 at most and 2^-9 at least, with the same rounding, and
scales up to 2^119; an inf becomes NaN. It has one bit of mantissa less, and is for those who come from torchao.
`OptimStateFp8` there reads the same numbers from the same codes and scales; its scales are FP32 numbers that bring the
largest of a block of 256 to 448, and it rounds to nearest.

**"4bit".** A code is a position in a list of 16 numbers, and means that number times the scale's magnitude::

    scale > 0   all elements are above 0   1/16, 2/16, ... 1
    scale < 0   others                     -.8875 -.6625 -.4375 -.2125 -.0775 -.0325 -.0055
                                           0 .0055 .0325 .0775 .2125 .4375 .6625 .8875 1

Two codes share a byte, the first in the upper half. So rows have an even number of elements: other state is in 8 bits
(`hmpx.updates.holding.held`).

The scale is the smallest one, from 2^-126 on, under which no element is past the ends of the list. The last bit of a
negative scale is 1 if no element is negative, else 0. A block with an inf or a NaN becomes NaN as a whole.

The rounding is::

    y           x / |scale|, rounded to FP32
    low, high   the numbers of the list on both sides of y
    the result  high where (y - low) * 65536 > (r + 1/2) * (high - low), else low

0 stays 0. The limit: where gradients are less than a fourth of the largest of their block, the second moment is larger
than it should be, a sixteenth of the largest, and their updates are smaller than with FP32 state.

Measured with the transformer of ``examples/charlm.py``, three seeds::

    the part of the gap between FP32 and BF16 to nearest that is closed   4 bits    8 bits
    AdamW, learning rate 3e-4, 400 steps                                  97.2 %   100.0 %
    the same, 1500 steps                                                 100.9 %   100.5 %

    validation loss after 400 steps less that with FP32 state
    AdamW, learning rate 3e-3                                            +0.0012    0.0000
    Lion, 3e-4                                                           -0.0061   -0.0010

The noise of 4 bits makes updates larger where a second moment is small: the network of ``examples/digits.py`` (AdamW,
1e-4, 30 epochs) is at a loss of .92 where FP32 state has 1.14 and 8 bits 1.14; at 1e-3 and 150 epochs both have .09.

Sources: a scale for each block is from Dettmers et al., "8-bit optimizers via block-wise quantization" (ICLR 2022).
Scales that are powers of two are from the "OCP Microscaling formats" specification (2023). The two lists of 4 bits are
from Li et al., "Memory efficient optimizers with 4-bit states" (NeurIPS 2023). torchao's `OptimState4bit` reads the
same numbers from the same codes and scales. Its scales are FP32, and it rounds to nearest. There a whole tensor has one
list, so zeros of a second moment become 1/16. The largest magnitude becomes 1, so a number near -1 becomes -.8875.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeGuard

import torch

from hmpx.base.tensors import lacks_data
from hmpx.rounding.coding import StateCode
from hmpx.rounding.devices import reinterpreted, shifted
from hmpx.rounding.shared import FLOATS, FOUR, SIXTEEN, CodeName, FloatNumbers

Tensor = torch.Tensor

_EXPONENTS = 1, 253  # the least and the largest of scales in 8 bits: the inverse of each scale is a normal number, too


class FloatCode(StateCode):
    """Floating-point numbers of 8 bits, with scales that are powers of two."""

    def __init__(self, kind: int, of: FloatNumbers) -> None:
        self.kind, self.name, self.words, self.prefix = kind, of.name, of.words, of.prefix
        self._last, self._nan, self._step, self._shift = of.last, of.nan, 1 << of.mantissa, of.shift
        self._unsigned, self._signed = of.ones

    def scales_for(self, magnitudes: Tensor, not_positive: Tensor) -> Tensor:
        exponent, mantissa = divmod(self._last, self._step)
        up = ((self._step - mantissa) << self._shift) - 1  # it carries into the exponent past the largest mantissa
        exponents = (shifted(magnitudes + up, 23) - exponent).clamp(_EXPONENTS[0], min(_EXPONENTS[1], 254 - exponent))
        negatives = (not_positive > 1).to(torch.int32)
        return reinterpreted((exponents * 0x80 - negatives * 0x8000).to(torch.int16), torch.bfloat16)

    def codes_of(self, values: Tensor, r: Tensor, scale: Tensor) -> Tensor:
        signed, magnitude = scale < 0, values.abs()
        one = self._one(signed)
        y = torch.where(magnitude < math.inf, magnitude, 0) * (1 / scale.float().abs())
        normal = reinterpreted(y, torch.int32) - (127 - one) * 0x800000
        below = reinterpreted(y + _power_of_two(1 - one), torch.int32) - (128 - one) * 0x800000  # a number of ulps
        unit = 1 << (self._shift - 16)
        code = shifted(torch.maximum(below, normal) + (r * unit + unit // 2), self._shift)
        code = torch.where(signed | (magnitude == 0), code, code.clamp(min=1))
        last = one * self._step + self._last
        code = torch.minimum(code, last)
        code = torch.where(magnitude == math.inf, last + 1, torch.where(values.isnan(), self._nan_of(one), code))
        return torch.where(values < 0, code + 0x80, code)

    def numbers_of(self, codes: Tensor, scale: Tensor) -> Tensor:
        signed = scale < 0
        one = self._one(signed)
        magnitude = torch.where(signed, codes & 0x7F, codes)
        bits = magnitude * (1 << self._shift) + (127 - one) * 0x800000
        below = reinterpreted(bits + 0x800000, torch.float32) - _power_of_two(1 - one)
        y = torch.where(magnitude < self._step, below, reinterpreted(bits, torch.float32))
        y = torch.where(magnitude == one * self._step + self._last + 1, math.inf, y)
        y = torch.where(magnitude == self._nan_of(one), math.nan, y)
        y = y * scale.float().abs()
        return torch.where(signed & (codes >= 0x80), -y, y)

    def _one(self, signed: Tensor) -> Tensor:
        """Return the exponent of the number 1 in each block, int32."""
        return self._unsigned + (self._signed - self._unsigned) * signed.to(torch.int32)

    def _nan_of(self, one: Tensor) -> Tensor:
        return one * self._step + self._nan


def _power_of_two(exponents: Tensor) -> Tensor:
    return reinterpreted((exponents + 127) * 0x800000, torch.float32)


_ZERO = SIXTEEN.index(0.0)
_LEAST, _MOST, _NAN = 0x0080, 0x7F7F, 0x7FC0  # BF16 scales of "4bit", as bits


class FourBits(StateCode):
    """Positions in two lists of 16 numbers."""

    name, words, prefix, bits, is_stable, has_infinity = "4bit", "4 bits", "hmpx_4bit_", 4, False, False
    kind, zero = FOUR, (_ZERO * 17, -1.0)

    def scales_for(self, magnitudes: Tensor, not_positive: Tensor) -> Tensor:
        below = reinterpreted((not_positive - 1).clamp(min=0), torch.float32) * (1 / SIXTEEN[14])
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


def _lists(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the signed list and the other one, in one tensor, and the gaps above their numbers."""
    return _made(like.device) if not lacks_data(like) else _made.__wrapped__(like.device)


@functools.cache
def _made(device: torch.device) -> tuple[Tensor, Tensor]:
    both = torch.tensor([*SIXTEEN, *(i / 16 for i in range(1, 17))], dtype=torch.float32, device=device)
    return both, both.roll(-1) - both


_FLOATS = (FloatCode(kind, numbers) for kind, numbers in FLOATS.items())
STATE_CODES: dict[CodeName, StateCode] = {code.name: code for code in (*_FLOATS, FourBits())}
EIGHT_BITS = STATE_CODES["8bit"]
SCALES = "hmpx_scales_"  # the key of scales is this and the optimizer's own name of the state tensor
_PREFIXES = {code.prefix: code for code in STATE_CODES.values()}


def code_of(key: Any) -> StateCode | None:
    """Return the code in which a parameter's state under `key` is held; None if it is not in codes."""
    return _code_of(key) if isinstance(key, str) and key.startswith("hmpx_") else None


@functools.lru_cache(maxsize=4096)
def _code_of(key: str) -> StateCode | None:
    prefix = max(filter(key.startswith, _PREFIXES), key=len, default="")  # "hmpx_fp8_" begins "hmpx_fp8_e5m2_", too
    return _PREFIXES.get(prefix)


def is_coded(state: Any) -> TypeGuard[dict]:
    """Return whether some of a parameter's state is in codes of a few bits."""
    if isinstance(state, dict):
        for key in state:  # a loop, as every step asks this of every parameter
            if code_of(key) is not None:
                return True
    return False
