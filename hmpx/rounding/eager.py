"""The rounding kernel in eager torch: any device, no compiler."""

from __future__ import annotations

import threading

import torch

Tensor = torch.Tensor

GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97
BF16_MAX = torch.finfo(torch.bfloat16).max
_CHUNK = 262144  # elements: few enough for the cache, enough to pay for the dozen kernel calls and for two threads


def signed(x: int) -> int:
    """The int32 with the low 32 bits of `x`."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


class _Scratch:
    """Buffers and constants of the kernel on one device, in one thread.

    In eager torch a 0-dim tensor is a cheaper operand than a Python number. `>>` on int32 is arithmetic, so every shift
    is masked afterwards; without the mask the hash is two-to-one.
    """

    def __init__(self, device: torch.device) -> None:
        half = _CHUNK // 2 + 1

        def constant(value: int) -> Tensor:
            return torch.tensor(signed(value), dtype=torch.int32, device=device)

        self.products = torch.arange(half, dtype=torch.int32, device=device).mul_(signed(GOLDEN))
        self.hash = torch.empty(half, dtype=torch.int32, device=device)
        self.shifted = torch.empty(half, dtype=torch.int32, device=device)
        self.bits = torch.empty(_CHUNK, dtype=torch.int32, device=device)
        self.by_15, self.by_16 = constant(15), constant(16)
        self.low_17, self.low_16 = constant(0x1FFFF), constant(0xFFFF)
        self.multiply_1, self.multiply_2 = constant(MULTIPLY_1), constant(MULTIPLY_2)
        self.high_16 = constant(0xFFFF0000)


_local = threading.local()


def _scratch(device: torch.device) -> _Scratch:
    cache = _local.__dict__.setdefault("scratch", {})
    if device not in cache:
        cache[device] = _Scratch(device)
    return cache[device]


def round_(out: Tensor, x: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """`out` bfloat16 and `x` float32: of one shape, contiguous, within one key.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    rows = zip(out.view(-1).split(width or x.numel()), x.view(-1).split(width or x.numel()), strict=True)
    for row, (out_row, x_row) in enumerate(rows):
        _round_row(out_row, x_row, key, offset + row * stride)


def _round_row(out: Tensor, x: Tensor, key: int, offset: int) -> None:
    c, x, out = _scratch(x.device), x.view(-1), out.view(-1)
    odd = offset & 1
    k2 = torch.tensor(signed(key >> 32), dtype=torch.int32, device=x.device)
    keys = [signed(key + ((offset + start) // 2) * GOLDEN) for start in range(0, x.numel(), _CHUNK)]
    first_keys = torch.tensor(keys, dtype=torch.int32, device=x.device).unbind()
    # A sum of squares below 1e38 proves that there is no inf, no NaN and no number past BF16's maximum.
    special = not torch.dot(x, x).item() < 1e38
    last = None
    for k1, x_chunk, out_chunk in zip(first_keys, x.split(_CHUNK), out.split(_CHUNK), strict=True):
        if (count := x_chunk.numel()) != last:
            last = count
            pairs = (count + odd + 1) // 2
            products, h, t, bits = c.products[:pairs], c.hash[:pairs], c.shifted[:pairs], c.bits[:count]
            # Little-endian: the low half of a number belongs to the even element.
            halves, rounded = h.view(torch.uint16)[odd : odd + count], bits.view(torch.float32)
        torch.add(products, k1, out=h)
        torch.bitwise_right_shift(h, c.by_16, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_16)).mul_(c.multiply_1)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17)).bitwise_xor_(k2).mul_(c.multiply_2)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17))
        bits.copy_(halves)
        bits.add_(x_chunk.view(torch.int32)).bitwise_and_(c.high_16)
        out_chunk.copy_(rounded)
        if special:
            nearest = torch.where(x_chunk.isnan(), _quiet(x_chunk), x_chunk.to(torch.bfloat16))
            out_chunk.copy_(torch.where(x_chunk.abs() <= BF16_MAX, out_chunk, nearest))


def numbers_(out: Tensor, _: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """The random numbers by which `round_` rounds: 16 bits each, in int32 `out`, flat."""
    for row, out_row in enumerate(out.split(width or out.numel())):
        _numbers_of_row(out_row, key, offset + row * stride)


def _numbers_of_row(out: Tensor, key: int, offset: int) -> None:
    c, odd = _scratch(out.device), offset & 1
    k2 = torch.tensor(signed(key >> 32), dtype=torch.int32, device=out.device)
    for start, part in zip(range(0, out.numel(), _CHUNK), out.split(_CHUNK), strict=True):
        k1 = torch.tensor(signed(key + ((offset + start) // 2) * GOLDEN), dtype=torch.int32, device=out.device)
        pairs = (part.numel() + odd + 1) // 2
        h, t = c.hash[:pairs], c.shifted[:pairs]
        torch.add(c.products[:pairs], k1, out=h)
        torch.bitwise_right_shift(h, c.by_16, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_16)).mul_(c.multiply_1)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17)).bitwise_xor_(k2).mul_(c.multiply_2)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17))
        part.copy_(h.view(torch.uint16)[odd : odd + part.numel()])


def _quiet(x: Tensor) -> Tensor:
    """The BF16 quiet NaN with the sign and the upper payload of an FP32 one; torch's own cast drops them."""
    return (x.view(torch.int32) >> 16).to(torch.int16).bitwise_or_(0x40).view(torch.bfloat16)
