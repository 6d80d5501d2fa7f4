"""An FP32 number as a BF16 one and an int16.

``upper = (bits + 0x8000) >> 16``, ``lower = int16(bits)``, ``bits = (upper << 16) + lower``. The upper half is the
number rounded to nearest, ties away from zero. Exact for every number and for inf. NaN stays NaN in the upper half and
in the whole; payloads that rounding would carry out of the NaNs become the quiet NaN's.

All functions want `torch.no_grad()`.
"""

from __future__ import annotations

import torch

from hmpx.kernels import native

Tensor = torch.Tensor


def split(x: Tensor, upper: Tensor, lower: Tensor) -> None:
    """FP32 `x` into BF16 `upper` and int16 `lower`, which `join` puts together again."""
    if native.can_read(x, upper, lower):
        native.call("split_halves", x, upper, lower)
        torch.autograd.graph.increment_version(upper)
        return
    bits = _kept_bits(x)
    lower.copy_(bits)  # to the low 16 bits, as C casts
    upper.view(torch.int16).copy_(bits.add_(0x8000) >> 16)


def join(upper: Tensor, lower: Tensor, out: Tensor) -> None:
    """The inverse of `split`, into the FP32 tensor `out`."""
    if native.can_read(upper, lower, out):
        native.call("join_halves", upper, lower, out)
        return
    bits = out.view(torch.int32)
    bits.copy_(upper.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(lower)


def follow(masters: Tensor, weights: Tensor, out: Tensor) -> None:
    """FP32 `masters` into `out`; where a BF16 weight is no rounding of its master, the weight."""
    if native.can_read(masters, weights, out):
        native.call("follow_weights", masters, weights, out)
        return
    out.copy_(masters)
    away = (_kept_bits(out).add_(0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    written = (out.to(torch.bfloat16) != weights) & (away != weights)  # ties may go either way
    if written.any():
        torch.where(written, weights.float(), out, out=out)


def _kept_bits(x: Tensor) -> Tensor:
    """The bits of `x` in a tensor of its own, with the NaNs that rounding would make something else quiet."""
    bits = x.view(torch.int32).clone()
    magnitude = bits & 0x7FFFFFFF
    lost = ((magnitude > 0x7F800000) & (magnitude < 0x7F808000)) | (magnitude >= 0x7FFF8000)
    if lost.any():
        bits[lost] = bits[lost].bitwise_and_(-0x80000000).bitwise_or_(0x7FC00000)
    return bits
