"""State in 8 bits, worked out another way: from a list of all numbers that a code has, in FP64, without their bits."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

BLOCK = 128
KINDS = {"codes": "hmpx_codes_", "scales": "hmpx_scales_"}


def grid(signed):
    """The magnitudes of a code in the order of its codes, for a scale of 1."""
    top = 7 if signed else 15
    numbers = [m / 16 * 2.0 ** (1 - top) for m in range(16)]
    numbers += [(1 + m / 16) * 2.0 ** (e - top) for e in range(1, top + 1) for m in range(16)]
    return np.array(numbers[:-2])  # the last two codes are inf and NaN


def numbers(count, seed, step, name):
    """The 16 random bits of the first elements of a tensor, from the specification in `hmpx.rounding.stochastic`."""

    def link(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    key = link(seed)
    for value in (step, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"), 0):
        key = link(key ^ value)
    element = np.arange(count, dtype=np.uint64)
    word = np.uint64(2**32 - 1)
    h = ((element >> np.uint64(1)) * np.uint64(0x9E3779B9) + np.uint64(key % 2**32)) & word
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x21F0AAAD) & word
    h ^= h >> np.uint64(15)
    h ^= np.uint64(key >> 32)
    h = h * np.uint64(0x735A2D97) & word
    h ^= h >> np.uint64(15)
    return np.where(element % 2 == 1, h >> np.uint64(16), h & np.uint64(0xFFFF)).astype(np.int64)


def row_length(shape):
    """A row is the last dimension, with those before it, but not the first, as long as it is shorter than a block."""
    length, rest = (shape[-1], list(shape[1:-1])) if shape else (1, [])
    while rest and length < BLOCK:
        length *= rest.pop()
    return length


def in_8_bits(x, *, seed, step, name):
    """What FP32 `x` is after it was held in 8 bits, the codes, and the scales in the order of their blocks."""
    values, r = x.double().contiguous().view(-1).numpy(), numbers(x.numel(), seed, step, name)
    row, held, codes, scales = row_length(x.shape), np.empty_like(values), np.empty(len(values), np.uint8), []
    for begin in range(0, len(values), row or 1):
        for at in range(begin, begin + row, BLOCK):
            here = slice(at, min(at + BLOCK, begin + row))
            held[here], codes[here], scale = _block(values[here], r[here])
            scales.append(scale)
    shaped = torch.from_numpy(held).float().view(x.shape)
    return shaped, torch.from_numpy(codes).view(x.shape), torch.tensor(scales, dtype=torch.float64)


def _block(x, r):
    finite, signed = np.abs(x[np.isfinite(x)]), bool((x < 0).any())
    most, code = max(finite, default=0.0), grid(signed)
    exponent = math.ceil(math.log2(most / code[-1])) if most > 0 else -126
    scale = 2.0 ** min(max(exponent, -126), 126)
    held, codes = x.copy(), np.zeros(len(x), np.uint8)
    for i, value in enumerate(x):
        sign = 128 if value < 0 else 0
        if not math.isfinite(value):
            codes[i] = sign + len(code) + bool(math.isnan(value))
            continue
        y = abs(value) / scale
        below = int(np.searchsorted(code, y, side="right")) - 1
        if below < len(code) - 1:
            part = (y - code[below]) / (code[below + 1] - code[below])
            below += round(part * 2**19) + 8 * int(r[i]) + 4 >= 2**19
        if value > 0 and not signed:
            below = max(below, 1)
        codes[i], held[i] = sign + below, math.copysign(code[below], value) * scale
    return held, codes, -scale if signed else scale


def beside_the_finest_steps(signed, r):
    """A block of numbers below the least exponent, with these random numbers, and its codes but for the first one.

    They lie a quarter, a half and three quarters of the finest step, 2^-19 of a code, below where rounding goes up.
    """
    i, top = torch.arange(len(r)), 7 if signed else 15
    upper, below = 2 + i % 5, torch.tensor([0.0, 0.25, 0.5, 0.75])[i % 4]
    steps = upper.double() * 2**19 - 8 * r - 4 - below
    x = (steps * 2.0 ** -(top + 22)).float()
    assert torch.equal(x.double() * 2.0 ** (top + 22), steps)
    x[0] = -1.8125 if signed else 1.8125
    return x, (upper - (below > 0.5).long()).to(torch.uint8)


def read(state, key):
    """A state tensor that is held in 8 bits, in FP32; one that is not, as it is."""
    codes, scales = (state.get(f"{kind}{key}") for kind in KINDS.values())
    if codes is None:
        return state[key]
    row, blocks, signs = row_length(codes.shape), scales.double().view(-1).numpy(), {}
    for signed in (False, True):
        magnitudes = np.concatenate([grid(signed), [np.inf, np.nan]])
        signs[signed] = np.concatenate([magnitudes, -magnitudes]) if signed else magnitudes
    flat, per_row = codes.reshape(-1).numpy(), -(-row // BLOCK)
    out = np.empty(len(flat))
    for i, code in enumerate(flat):
        scale = blocks[i // row * per_row + i % row // BLOCK]
        out[i] = signs[bool(scale < 0)][code] * abs(scale)
    return torch.from_numpy(out).float().view(codes.shape)


def widened(state):
    """The state of a parameter with what is held in 8 bits in FP32, by the optimizer's own keys."""
    keys = [key.removeprefix(KINDS["codes"]) for key in state if not str(key).startswith(KINDS["scales"])]
    return {key: read(state, key) for key in keys}
