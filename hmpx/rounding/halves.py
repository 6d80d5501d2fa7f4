"""An FP32 number as a BF16 one and an int16, or one of 24 bits as a BF16 one and an int8.

``upper = (bits + 0x8000) >> 16``, ``lower = int16(bits)``, ``bits = (upper << 16) + lower``. The upper half is the
number rounded to nearest, ties away from zero. Exact for every number and for inf. NaN stays NaN in the upper half and
in the whole; payloads that rounding would carry out of the NaNs become the quiet NaN's. An upper half that somebody has
written keeps the lower half that is there; beside a written 0 or inf it is left out where it would make a NaN.

A number of 24 bits is an FP32 one whose last 8 bits are zero: ``bits = (upper << 16) + (lower << 8)``. FP32 numbers
are rounded to it stochastically, ``(bits + (r >> 8)) & ~0xFF`` with the 16-bit number r of an element that
`stochastic.py` specifies; those past the largest one are cut off.

This is the arithmetic in torch's operators, on any device. The kernels in C and Triton have it for whole steps. All
functions want `torch.no_grad()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hmpx.rounding.devices import is_on_host, reinterpreted, shifted
from hmpx.rounding.keys import Keys, Span
from hmpx.rounding.stochastic import random_numbers

Tensor = torch.Tensor


def split(x: Tensor, upper: Tensor, lower: Tensor, spans: Sequence[Span] = (), keys: Keys = (0, 0, "")) -> None:
    """Write the halves of FP32 `x` to BF16 `upper` and int16 or int8 `lower`; `join` is the inverse.

    spans, keys: for int8, what the random numbers of the elements of `x`, row by row, depend on.
    """
    bits = _kept_bits(x)
    if lower.dtype is torch.int8:
        r = shifted(random_numbers(x, spans, keys), 8).view(x.shape)
        bits = bits + torch.where((bits & 0x7FFFFFFF) <= 0x7F7FFF00, r, 0)
        lower.copy_(shifted(bits, 8))  # to the low 8 bits, as C casts
        bits = bits & -0x100
    else:
        lower.copy_(bits)  # to the low 16 bits, as C casts
    upper.copy_(_upper(bits))


def join(upper: Tensor, lower: Tensor, out: Tensor) -> None:
    """Write the FP32 numbers with these halves to `out`."""
    rest = lower.to(torch.int32) * (0x100 if lower.dtype is torch.int8 else 1)
    # The opposite sign beside 0 and inf would make NaNs.
    rest = torch.where(upper == 0, rest.clamp(min=0), torch.where(upper.isinf(), rest.clamp(max=0), rest))
    out.copy_(reinterpreted(reinterpreted(upper, torch.int16).to(torch.int32) * 0x10000 + rest, torch.float32))


def read_masters(masters: Tensor, weights: Tensor, out: Tensor) -> None:
    """Copy FP32 `masters` into `out`. Where a master does not round to its BF16 weight, copy the weight."""
    out.copy_(masters)
    # A tie may have been rounded either way.
    written = (masters.to(torch.bfloat16) != weights) & (_upper(_kept_bits(masters)) != weights)
    if not is_on_host(out) or written.any():
        out.copy_(torch.where(written, weights.float(), masters))


def _upper(bits: Tensor) -> Tensor:
    """Return the BF16 number that the FP32 number with these bits rounds to, ties away from zero."""
    return reinterpreted(shifted(bits + 0x8000, 16).to(torch.int16), torch.bfloat16)


def _kept_bits(x: Tensor) -> Tensor:
    """Return the bits of `x`. NaNs that rounding would turn into another number are made quiet first."""
    bits = reinterpreted(x, torch.int32)
    magnitude = bits & 0x7FFFFFFF
    lost = ((magnitude > 0x7F800000) & (magnitude < 0x7F808000)) | (magnitude >= 0x7FFF8000)
    if not is_on_host(bits) or lost.any():
        bits = torch.where(lost, bits & -0x80000000 | 0x7FC00000, bits)
    return bits
