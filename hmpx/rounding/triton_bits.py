"""The arithmetic of rounding, codes of 8 bits and halves in Triton; `native.h`, `native_codes.c` and `native_masters.c`
have it in C.

It uses integers, and floating-point numbers only where no result is rounded, so the bits are those in C.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def scale_of(x, inside):
    """Return the exponents of the scales of blocks, as FP32 has them, and whether a number is negative; int32."""
    bits = bits_of(x)
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    largest = tl.max(tl.where(inside & (magnitude < 0x7F800000), magnitude, 0), 1)
    negative = tl.where(inside & (bits > 0x80000000) & (bits <= 0xFF800000), 1, 0)
    exponent = (largest + 0x17FFFF) >> 23  # the next one where 1.8125 is passed
    return tl.minimum(tl.maximum(exponent, 1), 253), tl.max(negative, 1)


@triton.jit
def encoded(x, r, exponent, signed):
    bits = bits_of(x)
    magnitude = (bits & 0x7FFFFFFF).to(tl.int32)
    top, finite = 15 - 8 * signed, tl.where(magnitude < 0x7F800000, magnitude, 0)
    y = float_of(finite) * float_of((254 - exponent) << 23)
    normal = bits_of(y).to(tl.int32) - ((127 - top) << 23)
    below = bits_of(y + float_of((128 - top) << 23)).to(tl.int32) - ((128 - top) << 23)  # an ulp is 1 there
    code = (tl.maximum(below, normal) + (r * 8 + 4).to(tl.int32)) >> 19
    code = tl.where(signed == 1, code, tl.maximum(code, tl.minimum(magnitude, 1)))  # no positive number becomes 0
    code = tl.minimum(code, top * 16 + 13)
    code = tl.where(magnitude == 0x7F800000, top * 16 + 14, tl.where(magnitude > 0x7F800000, top * 16 + 15, code))
    return tl.where((bits > 0x80000000) & (bits <= 0xFF800000), code + 0x80, code)


@triton.jit
def decoded(code, exponent, signed):
    top, magnitude = 15 - 8 * signed, tl.where(signed == 1, code & 0x7F, code)
    bits = (magnitude << 19) + ((127 - top) << 23)
    below = float_of(bits + 0x800000) - float_of((1 - top + 127) << 23)
    y = bits_of(tl.where(magnitude < 16, below, float_of(bits)) * float_of(exponent << 23))
    y = tl.where(magnitude == top * 16 + 14, 0x7F800000, tl.where(magnitude == top * 16 + 15, 0x7FC00000, y))
    return float_of(tl.where(signed == 1, y | ((code & 0x80) << 24).to(tl.uint32), y))


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
