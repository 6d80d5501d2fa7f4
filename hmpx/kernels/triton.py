"""The rounding kernel in Triton: CUDA, one pass over memory.

Triton comes with torch's CUDA builds. ``TRITON_INTERPRET=1`` runs the kernel on the CPU, which is how it is tested
where there is no GPU.
"""

from __future__ import annotations

import functools

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_PAIRS = 1024  # pairs of elements a program rounds


def available() -> bool:
    """Whether Triton can be imported."""
    return triton is not None


def round_(out: torch.Tensor, x: torch.Tensor, key: int, offset: int) -> None:
    """`out` bfloat16 and `x` float32: of one shape, contiguous, on one CUDA device, within one key."""
    count, odd = x.numel(), offset & 1
    programs = triton.cdiv((count + odd + 1) // 2, _PAIRS)
    with torch.cuda.device_of(x):
        _kernel()[(programs,)](
            x.view(torch.int32), out.view(torch.int16), count, odd, offset >> 1, key & 0xFFFFFFFF, key >> 32, _PAIRS
        )


@functools.cache
def _kernel():
    @triton.jit(do_not_specialize=["count", "odd", "first", "k1", "k2"])
    def round_stochastic(x_bits, out_bits, count, odd, first, k1, k2, PAIRS: tl.constexpr):
        pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        h = (pair + first).to(tl.uint32) * 0x9E3779B9 + k1.to(tl.uint32)
        h ^= h >> 16
        h *= 0x21F0AAAD
        h ^= h >> 15
        h ^= k2.to(tl.uint32)
        h *= 0x735A2D97
        h ^= h >> 15
        half = tl.arange(0, 2)
        element = 2 * pair[:, None] + half[None, :] - odd
        inside = (element >= 0) & (element < count)
        bits = tl.load(x_bits + element, mask=inside, other=0).to(tl.uint32, bitcast=True)
        r = (h[:, None] >> (16 * half[None, :]).to(tl.uint32)) & 0xFFFF
        magnitude = bits & 0x7FFFFFFF
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        nearest = tl.where(magnitude <= 0x7F800000, even, bits | 0x400000)  # a NaN stays one, made quiet
        rounded = tl.where(magnitude <= 0x7F7F0000, bits + r, nearest) >> 16
        tl.store(out_bits + element, rounded.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)

    return round_stochastic
