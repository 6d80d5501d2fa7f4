"""Numbers that rounding has to get right, and a rounding to BF16 that torch does not have."""

import numpy as np
import torch

from hmpx.ops.policies.fp8_format import in_parts

BF16 = torch.bfloat16


def away(x):
    """FP32 rounded to BF16, ties away from zero."""
    return ((x.contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(BF16)


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
