"""Numbers that rounding has to get right, and a rounding to BF16 that torch does not have."""

from __future__ import annotations

import numpy as np
import torch

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
