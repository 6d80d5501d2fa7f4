"""The arithmetic of rounding, codes and halves in Triton; `native.h`, `native_codes.c` and `native_masters.c`
have it in C.

It uses integers, and floating-point numbers only where no result is rounded, so the bits are those in C.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hmpx.rounding import four_bit_lists

SIXTEEN, GAPS = tl.constexpr(four_bit_lists.SIGNED), tl.constexpr(four_bit_lists.GAPS)
STRETCH = tl.constexpr(four_bit_lists.STRETCHED)


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
def rounded(bits, r):
    return tl.where((bits & 0x7FFFFFFF) <= 0x7F7F0000, (bits + r) >> 16, nearest(bits))


@triton.jit
def scale_of(x, inside, IS_FP8: tl.constexpr):
    """Return the exponents of the scales of blocks, as FP32 has them, and whether a number is negative; int32."""
    UP: tl.constexpr = 0x1FFFFF if IS_FP8 else 0x17FFFF  # the next one where the largest mantissa is passed
    LESS: tl.constexpr = 8 if IS_FP8 else 0
    MOST: tl.constexpr = 246 if IS_FP8 else 253
    bits = bits_of(x)
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    largest = tl.max(tl.where(inside & (magnitude < 0x7F800000), magnitude, 0), 1)
    negative = tl.where(inside & (bits > 0x80000000) & (bits <= 0xFF800000), 1, 0)
    exponent = ((largest + UP) >> 23) - LESS
    return tl.minimum(tl.maximum(exponent, 1), MOST), tl.max(negative, 1)


@triton.jit
def encoded(x, r, exponent, signed, IS_FP8: tl.constexpr):
    SHIFT: tl.constexpr = 20 if IS_FP8 else 19
    LAST: tl.constexpr = 70 if IS_FP8 else 13
    NAN: tl.constexpr = 71 if IS_FP8 else 15
    bits, one = bits_of(x), exponent_of_one(signed, IS_FP8)
    magnitude, zero = (bits & 0x7FFFFFFF).to(tl.int32), one << (23 - SHIFT)
    y = float_of(tl.where(magnitude < 0x7F800000, magnitude, 0)) * float_of((254 - exponent) << 23)
    normal = bits_of(y).to(tl.int32) - ((127 - one) << 23)
    below = bits_of(y + float_of((128 - one) << 23)).to(tl.int32) - ((128 - one) << 23)  # an ulp is 1 there
    code = (tl.maximum(below, normal) + (r * (1 << (SHIFT - 16)) + (1 << (SHIFT - 17))).to(tl.int32)) >> SHIFT
    code = tl.where(signed == 1, code, tl.maximum(code, tl.minimum(magnitude, 1)))  # no positive number becomes 0
    code = tl.minimum(code, zero + LAST)
    code = tl.where(magnitude == 0x7F800000, zero + LAST + 1, tl.where(magnitude > 0x7F800000, zero + NAN, code))
    return tl.where((bits > 0x80000000) & (bits <= 0xFF800000), code + 0x80, code)


@triton.jit
def decoded(code, exponent, signed, IS_FP8: tl.constexpr):
    SHIFT: tl.constexpr = 20 if IS_FP8 else 19
    LAST: tl.constexpr = 70 if IS_FP8 else 13
    NAN: tl.constexpr = 71 if IS_FP8 else 15
    one, magnitude = exponent_of_one(signed, IS_FP8), tl.where(signed == 1, code & 0x7F, code)
    bits, zero = (magnitude << SHIFT) + ((127 - one) << 23), one << (23 - SHIFT)
    below = float_of(bits + 0x800000) - float_of((128 - one) << 23)
    is_below = magnitude < (1 << (23 - SHIFT))
    y = bits_of(tl.where(is_below, below, float_of(bits)) * float_of(exponent << 23))
    y = tl.where(magnitude == zero + NAN, 0x7FC00000, tl.where(magnitude == zero + LAST + 1, 0x7F800000, y))
    return float_of(tl.where(signed == 1, y | ((code & 0x80) << 24).to(tl.uint32), y))


@triton.jit
def exponent_of_one(signed, IS_FP8: tl.constexpr):
    return signed * 0 + 7 if IS_FP8 else 15 - 8 * signed


@triton.jit
def scale_of_four(x, inside):
    """Return the bits of the scales of blocks in 4 bits, int32."""
    bits = (bits_of(x) & 0x7FFFFFFF).to(tl.int32)
    largest = tl.max(tl.where(inside, bits, 0), 1)
    not_positive = tl.max(tl.where(inside & (x <= 0), bits + 1, 0), 1)
    stretched = float_of(tl.maximum(not_positive - 1, 0)) * STRETCH
    needed, odd = tl.maximum(largest, bits_of(stretched).to(tl.int32)), (not_positive == 1).to(tl.int32)
    half = tl.minimum(tl.maximum((needed + (2 - odd) * 0x10000 - 1) >> 17, 0x40), 0x3FBF)
    whole = tl.minimum(tl.maximum((needed + 0xFFFF) >> 16, 0x80), 0x7F7F)
    return tl.where(largest >= 0x7F800000, 0x7FC0, tl.where(not_positive > 0, half * 2 + odd + 0x8000, whole))


@triton.jit
def encoded_in_four(x, r, scale):
    x, scale = tl.broadcast(x, scale)
    y, signed = tl.div_rn(x, float_of((scale & 0x7FFF) << 16)), scale >= 0x8000
    sixteenth = tl.minimum(tl.maximum((y * 16.0).to(tl.int32) - 1, 0), 14)
    low, gap, code = y * 0.0 + SIXTEEN[0], y * 0.0 + GAPS[0], sixteenth * 0
    for k in tl.static_range(1, 15):
        is_past = y >= SIXTEEN[k]
        low, gap, code = tl.where(is_past, SIXTEEN[k], low), tl.where(is_past, GAPS[k], gap), code + is_past
    low = tl.where(signed, low, (sixteenth + 1).to(tl.float32) * 0.0625)
    gap, code = tl.where(signed, gap, 0.0625), tl.where(signed, code, sixteenth)
    code += (y - low) * 65536.0 > (r.to(tl.float32) + 0.5) * gap
    code = tl.where(signed & ((scale & 1) == 1) & (x > 0), tl.maximum(code, 8), code)  # 8: above 0
    return tl.where((scale & 0x7FFF) > 0x7F80, 0, code)


@triton.jit
def decoded_of_four(code, scale):
    code, scale = tl.broadcast(code, scale)
    number = (code + 1).to(tl.float32) * 0.0625
    for k in tl.static_range(16):
        number = tl.where((scale >= 0x8000) & (code == k), SIXTEEN[k], number)
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
