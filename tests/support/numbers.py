"""Numbers that rounding has to get right, and how far apart rounded ones are."""

import hashlib

import numpy as np
import torch

from hmpx.ops.policies.fp8_format import in_parts

BF16 = torch.bfloat16


def special_values():
    patterns = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x00800000, 0x7F7F0000, 0x7F7F0001, 0x7F7F7FFF]
    patterns += [0x7F7F8000, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x3F800000, 0x3F808000]
    patterns += [0x7F800000 | payload for payload in (1, 0x7F, 0x8000, 0xFFFF, 0x10000, 0x3FFFFF, 0x400000, 0x7FFFFF)]
    patterns += [0xFF800001, 0xFFC00000, 0xFFFFFFFF]
    return torch.tensor(np.array(patterns, dtype=np.uint32).view(np.float32))


def spread(shape, seed=0):
    """Numbers of many sizes, one in eight of them zero; nowhere negative where the seed is odd."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-6, 2, generator=generator)
    x = torch.where(torch.rand(shape, generator=generator) < 0.125, 0.0, x)
    return x.abs() if seed % 2 else x


def key_of(seed, step, name, high=0):
    """The key of elements ``high * 2**32`` and after, from the specification in `hmpx.rounding.stochastic`."""

    def link(value):
        value = (value + 0x9E3779B97F4A7C15) % 2**64
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
        return value ^ value >> 31

    identity = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    key = link(seed)
    for value in (step, identity, high):
        key = link(key ^ value)
    return key


def drawn(count, seed, step, name, first=0):
    """The 16 random bits of elements of a tensor, from the same specification; nothing is shared with the kernels."""
    element, word = np.arange(first, first + count, dtype=np.uint64), np.uint64(2**32 - 1)
    keys = [key_of(seed, step, name, high) for high in (first >> 32, (first >> 32) + 1)]
    low, high = (
        np.where(element >> np.uint64(32) == first >> 32, *(np.uint64(each) for each in halves))
        for halves in ([key % 2**32 for key in keys], [key >> 32 for key in keys])
    )
    h = (((element & word) >> np.uint64(1)) * np.uint64(0x9E3779B9) + low) & word
    h ^= h >> np.uint64(16)
    h = h * np.uint64(0x21F0AAAD) & word
    h ^= (h >> np.uint64(15)) ^ high
    h = h * np.uint64(0x735A2D97) & word
    h ^= h >> np.uint64(15)
    return np.where(element % 2 == 1, h >> np.uint64(16), h & np.uint64(0xFFFF)).astype(np.int64)


def steps_apart(one, other):
    """How many numbers that BF16 has lie between two BF16 tensors, element by element, the second one included."""
    ordered = []
    for each in (one, other):
        bits = each.contiguous().view(torch.int16).int()
        ordered.append(torch.where(bits >= 0, bits, -(bits & 0x7FFF)))
    return (ordered[0] - ordered[1]).abs()


def nearly_equal(one, other, differ, by=1):
    """Whether no more than `differ` elements of two BF16 tensors are different, and none by more than `by` steps."""
    apart = steps_apart(one.detach(), other.detach())
    return bool((apart > 0).sum() <= differ and apart.max() <= by)


def quantize(x, name, form, dim, scaling, weight=False, site=""):
    """Codes of FP8, and the scale: ``codes.float() * scale`` are the numbers that `x` becomes: `fp8_format`."""
    codes, scale, whole = in_parts(x, name, form, dim, scaling, weight, site)
    return codes, scale if whole is None else torch.ops.aten.mul(scale, whole)  # which no list names
