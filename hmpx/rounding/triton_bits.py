"""The arithmetic of rounding, codes and halves in Triton; `native.h`, `native_codes.c` and `native_masters.c`
have it in C.

It uses integers, and floating-point numbers only where no result is rounded, so the bits are those in C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hmpx.rounding.shared import FLOATS
from hmpx.rounding.shared import SIXTEEN as _SIXTEEN

SIXTEEN = tl.constexpr(_SIXTEEN)
BEFORE_LAST = tl.constexpr(0.8874999284744263)  # the FP32 number below SIXTEEN[14]
STRETCH = tl.constexpr(1 / _SIXTEEN[14])  # what the scale of a largest negative number is, for one of 1

# Of `FLOATS`, by kind: bits of an FP32 mantissa that a code lacks, the exponents of 1, the largest number's code less
# that of 1, whether there is inf, the largest number, and the number that the code of NaN would be.
SHIFTS = tl.constexpr({kind: of.shift for kind, of in FLOATS.items()})
UNSIGNED = tl.constexpr({kind: of.ones[0] for kind, of in FLOATS.items()})
SIGNED = tl.constexpr({kind: of.ones[1] for kind, of in FLOATS.items()})
LASTS = tl.constexpr({kind: of.last for kind, of in FLOATS.items()})
HAVE_INF = tl.constexpr({kind: of.has_inf for kind, of in FLOATS.items()})
LARGEST = tl.constexpr({kind: of.number(of.last) for kind, of in FLOATS.items()})
NANS = tl.constexpr({kind: of.number(of.nan) for kind, of in FLOATS.items()})


@triton.jit
def bits_of(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mixed(pair, k1, k2):
    h = pair * 0x9E3779B9 + k1
    h ^= h >> 16
    h *= 0x21F0AAAD
    h ^= h >> 15
    h ^= k2
    h *= 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def nearest(bits):
    """Return the bits of the nearest BF16 number, ties to even; a NaN stays a NaN, made quiet."""
    even = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where((bits & 0x7FFFFFFF) <= 0x7F800000, even, bits | 0x400000) >> 16


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rounded(x, r):
    """Add r below the 16 bits that stay. What is past the largest number becomes inf; NaN stays, made quiet."""
    bits = bits_of(x)
    if tl.reduce(tl.reduce(tl.abs(x), 1, _larger), 0, _larger) <= 3.3895313892515355e38:  # the largest in BF16
        upper = (bits + r) >> 16
    else:
        upper = tl.where((bits & 0x7FFFFFFF) <= 0x7F7F0000, (bits + r) >> 16, nearest(bits))
    return upper


@triton.jit
def coded(x, r, KIND: tl.constexpr):
    """Return the bits of the scales of blocks and the codes of numbers, int32; a tile without inf takes a short way."""
    SHIFT: tl.constexpr = SHIFTS[KIND]
    LAST: tl.constexpr = LASTS[KIND]
    STEPS: tl.constexpr = 1 << (23 - SHIFT)  # codes of one exponent
    UP: tl.constexpr = ((STEPS - LAST % STEPS) << SHIFT) - 1  # the next exponent where the largest mantissa is passed
    LESS: tl.constexpr = LAST // STEPS
    MOST: tl.constexpr = 253 if LAST < STEPS else 254 - LAST // STEPS  # the largest number is finite
    bits = bits_of(x)  # [blocks, elements]; scales, exponents and signs are [blocks]
    top = tl.max(bits, 1)  # of a negative number, if there is one
    largest = tl.maximum(tl.max(bits.to(tl.int32, bitcast=True), 1), (top & 0x7FFFFFFF).to(tl.int32))
    if tl.max(largest, 0) < ((MOST + LESS + 1) << 23) - UP:
        exponent, signed = tl.maximum(((largest + UP) >> 23) - LESS, 1), (top > 0x80000000).to(tl.int32)
        code = encoded_within(x, r, exponent[:, None], signed[:, None], KIND)
    else:
        magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
        largest = tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), 1)
        exponent = tl.minimum(tl.maximum(((largest + UP) >> 23) - LESS, 1), MOST)
        signed = (tl.min(tl.minimum(x, 0.0), 1) < 0).to(tl.int32)  # NaN is none of them
        code = encoded(x, r, exponent[:, None], signed[:, None], KIND)
    return exponent << 7 | signed << 15, code


@triton.jit
def encoded_within(x, r, exponent, signed, KIND: tl.constexpr):
    """Return the codes of numbers that are not past the last one.

    As FP32 with the exponent of a code, a number begins with its code: also below the least exponent of the code, where
    it is below that of FP32. So it is brought there, and what follows the code is rounded by r.
    """
    SHIFT: tl.constexpr = SHIFTS[KIND]
    one = exponent_of_one(signed, KIND)
    bits = bits_of((x * float_of((254 - exponent) << 23) + 0.0) * float_of(one << 23))  # without -0
    bits = tl.maximum(bits, tl.where(x > 0, (1 - signed) << SHIFT, 0).to(tl.uint32))
    bits += r * (1 << (SHIFT - 16)) + (1 << (SHIFT - 17))
    magnitude = 0xFFFFFFFF >> signed.to(tl.uint32)  # in front of it the sign, or nothing
    return ((((bits << (24 - SHIFT)) & magnitude) | (bits & ~magnitude)) >> 24).to(tl.int32)


@triton.jit
def encoded(x, r, exponent, signed, KIND: tl.constexpr):
    """Return the codes of any numbers; see `encoded_within`."""
    SHIFT: tl.constexpr = SHIFTS[KIND]
    LAST: tl.constexpr = LASTS[KIND]
    one = exponent_of_one(signed, KIND)
    bits = bits_of(tl.abs(x) * float_of((254 - exponent) << 23) * float_of(one << 23)).to(tl.int32)
    past = bits >> 22  # 510 of inf, 511 of NaN, whose codes come after the last one
    past = tl.maximum(past - 509, 0) if HAVE_INF[KIND] else (past >= 510).to(tl.int32)
    bits = tl.minimum(bits, ((one << (23 - SHIFT)) + LAST + past) << SHIFT)
    code = (bits + (r * (1 << (SHIFT - 16)) + (1 << (SHIFT - 17))).to(tl.int32)) >> SHIFT
    code = tl.where(x != 0, tl.maximum(code, 1 - signed), code)  # none but 0 becomes 0, where all are positive
    return code + tl.where(x < 0, 0x80, 0)


@triton.jit
def decoded(code, exponent, signed, KIND: tl.constexpr):
    """Return the numbers that codes stand for; see `encoded_within`."""
    SHIFT: tl.constexpr = SHIFTS[KIND]
    one = exponent_of_one(signed, KIND)
    bits = ((code << 24) >> (24 - SHIFT)) & (((0xFF >> signed) << SHIFT) | (signed << 31))
    y = float_of(bits) * float_of((254 - one) << 23)
    number, size = y * float_of(exponent << 23), tl.abs(y)
    if tl.max(tl.max(size, 1), 0) > LARGEST[KIND]:
        if HAVE_INF[KIND]:  # inf, then NaN
            number = tl.where(size > LARGEST[KIND], (NANS[KIND] - size) * (y * float("inf")), number)
        else:
            number = tl.where(size == NANS[KIND], float("nan"), number)
    return number


@triton.jit
def exponent_of_one(signed, KIND: tl.constexpr):
    LESS: tl.constexpr = UNSIGNED[KIND] - SIGNED[KIND]
    return UNSIGNED[KIND] - LESS * signed


@triton.jit
def scale_of_four(x):
    """Return the bits of the scales of blocks in 4 bits, int32."""
    bits = bits_of(x)
    top = tl.max(bits, 1)  # of a negative number, if there is one
    largest = tl.maximum(tl.max(bits.to(tl.int32, bitcast=True), 1), (top & 0x7FFFFFFF).to(tl.int32))
    not_positive = tl.where(top >= 0x80000000, (top & 0x7FFFFFFF) + 1, (tl.min(bits, 1) == 0).to(tl.uint32))
    not_positive = not_positive.to(tl.int32)
    stretched = float_of(tl.maximum(not_positive - 1, 0)) * STRETCH
    needed, odd = tl.maximum(largest, bits_of(stretched).to(tl.int32)), (not_positive == 1).to(tl.int32)
    half = tl.minimum(tl.maximum((needed + (2 - odd) * 0x10000 - 1) >> 17, 0x40), 0x3FBF)
    whole = tl.minimum(tl.maximum((needed + 0xFFFF) >> 16, 0x80), 0x7F7F)
    return tl.where(largest >= 0x7F800000, 0x7FC0, tl.where(not_positive > 0, half * 2 + odd + 0x8000, whole))


@triton.jit
def encoded_in_four(x, r, scale):
    """Return codes of 4 bits; most tiles have only blocks above 0, or no NaN."""
    scale_bits = scale & 0x7FFF
    y, half = tl.div_rn(x, float_of(scale_bits << 16)), float_of(r + 0x4B000000) - 8388607.5  # r + 1/2
    sixteenth = tl.minimum(tl.maximum((y * 16.0).to(tl.int32) - 1, 0), 14)
    code = sixteenth + ((y - sixteenths(sixteenth)) * 1048576.0 > half)
    if tl.max(tl.max(tl.where(scale_bits > 0x7F80, 0x8000, scale), 1), 0) >= 0x8000:
        signed = encoded_in_sixteen(y, half)
        signed = tl.where(((scale & 1) == 1) & (x > 0), tl.maximum(signed, 8), signed)  # 8: above 0
        code = tl.where(scale >= 0x8000, signed, code)
        code = tl.where(scale_bits > 0x7F80, 0, code)
    return code


@triton.jit
def sixteenths(number):
    """Return (number + 1) / 16: there FP32 counts in sixteenths."""
    return float_of(number + 0x49000001) - 524288.0


@triton.jit
def encoded_in_sixteen(y, half):
    """Return the positions in `SIXTEEN` to which y is rounded; half: their random numbers and 1/2."""
    below = y < 0
    size = tl.abs(y)
    size = tl.where(below, tl.minimum(float_of(bits_of(size) - 1), BEFORE_LAST), size)  # -x is above x, not at it
    p = size >= SIXTEEN[11]
    second = tl.where(p, SIXTEEN[13], SIXTEEN[9])
    q = size >= second
    third = tl.where(p, tl.where(q, SIXTEEN[14], SIXTEEN[12]), tl.where(q, SIXTEEN[10], SIXTEEN[8]))
    s = size >= third
    low = tl.where(s, third, tl.where(q, second, tl.where(p, SIXTEEN[11], 0.0)))
    high = tl.where(s, tl.where(q, tl.where(p, 1.0, SIXTEEN[11]), second), third)
    at = tl.where(p, 4, 0) + tl.where(q, 2, 0) + s.to(tl.int32)
    is_past = (y - tl.where(below, -high, low)) * 65536.0 > half * (high - low)
    return tl.where(below, 6 - at, 7 + at) + is_past


@triton.jit
def decoded_of_four(code, scale):
    number = sixteenths(code)
    if tl.max(tl.max(scale, 1), 0) >= 0x8000:
        at = tl.abs(code - 7)
        odd, second = (at & 1) != 0, (at & 2) != 0
        small = tl.where(second, tl.where(odd, SIXTEEN[10], SIXTEEN[9]), tl.where(odd, SIXTEEN[8], 0.0))
        large = tl.where(second, tl.where(odd, SIXTEEN[14], SIXTEEN[13]), tl.where(odd, SIXTEEN[12], SIXTEEN[11]))
        size = tl.where(at >= 8, 1.0, tl.where(at >= 4, large, small))
        number = tl.where(scale >= 0x8000, tl.where(code < 7, -size, size), number)
    return number * float_of((scale & 0x7FFF) << 16)


@triton.jit
def kept_bits(bits):
    """Return bits; a NaN that rounding would turn into another number is made quiet first."""
    magnitude = bits & 0x7FFFFFFF
    lost = ((magnitude > 0x7F800000) & (magnitude < 0x7F808000)) | (magnitude >= 0x7FFF8000)
    return tl.where(lost, (bits & 0x80000000) | 0x7FC00000, bits)


@triton.jit
def ties_away(bits):
    """Return the bits of the nearest BF16 number, ties away from zero."""
    return (bits + 0x8000) >> 16


@triton.jit
def are_one(a, b):
    """Return whether two BF16 numbers are equal; 0 and -0 are."""
    return (a == b) | (((a | b) & 0x7FFF) == 0)
