"""The rounding kernel in eager torch: any device, no compiler.

On a CPU it goes through the cache's size at a time, and looks at values to see whether it may leave a part out. On an
accelerator each call costs as much as some hundred thousand elements, and each look waits for the device. There it
rounds a tensor of any size in some 26 calls, and asks for no value; XLA's compiler fuses them. XLA flushes numbers
below BF16's normal range to zero where it likes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hmpx.rounding.devices import is_lazy, is_on_host, reinterpreted, shifted

Tensor = torch.Tensor

GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97
BF16_MAX = torch.finfo(torch.bfloat16).max
_INT32: dict[str, Any] = {"dtype": torch.int32, "device": "cpu"}
_CHUNK = 262144  # elements: few enough for the cache, enough to pay for the dozen kernel calls and for two threads


def signed(x: int) -> int:
    """Return the int32 with the low 32 bits of `x`."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


class _Scratch:
    """Buffers and constants of the kernel on a CPU, in one thread.

    In eager torch a 0-dim tensor is a cheaper operand than a Python number. `>>` on int32 is arithmetic, so every shift
    is masked afterwards; without the mask the hash is two-to-one.
    """

    def __init__(self) -> None:
        half = _CHUNK // 2 + 1

        def constant(value: int) -> Tensor:
            return torch.tensor(signed(value), **_INT32)

        self.products = torch.arange(half, **_INT32).mul_(signed(GOLDEN))
        self.hash, self.shifted = torch.empty(half, **_INT32), torch.empty(half, **_INT32)
        self.bits = torch.empty(_CHUNK, **_INT32)
        self.by_15, self.by_16 = constant(15), constant(16)
        self.low_17, self.low_16 = constant(0x1FFFF), constant(0xFFFF)
        self.multiply_1, self.multiply_2 = constant(MULTIPLY_1), constant(MULTIPLY_2)
        self.high_16 = constant(0xFFFF0000)


_local = threading.local()


def _scratch() -> _Scratch:
    if not hasattr(_local, "scratch"):
        _local.scratch = _Scratch()
    return _local.scratch


def round_(out: Tensor, x: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Round float32 `x` into bfloat16 `out`: equal shapes, contiguous, within one key.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    if not is_on_host(x):
        _round_at_once(out.view(-1), x.view(-1), key, offset, width or x.numel(), stride)
        return
    rows = zip(out.view(-1).split(width or x.numel()), x.view(-1).split(width or x.numel()), strict=True)
    for row, (out_row, x_row) in enumerate(rows):
        _round_row(out_row, x_row, key, offset + row * stride)


def _round_row(out: Tensor, x: Tensor, key: int, offset: int) -> None:
    c = _scratch()
    # A sum of squares below 1e38 proves that there is no inf, no NaN and no number past BF16's maximum.
    special = not torch.dot(x, x).item() < 1e38
    for here, numbers in _numbers_by_chunk(x.numel(), key, offset):
        x_chunk, out_chunk, bits = x[here], out[here], c.bits[: numbers.numel()]
        bits.copy_(numbers)
        bits.add_(x_chunk.view(torch.int32)).bitwise_and_(c.high_16)
        out_chunk.copy_(bits.view(torch.float32))
        if special:
            nearest = torch.where(x_chunk.isnan(), _quiet(x_chunk), x_chunk.to(torch.bfloat16))
            out_chunk.copy_(torch.where(x_chunk.abs() <= BF16_MAX, out_chunk, nearest))


def _numbers_by_chunk(count: int, key: int, offset: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the random numbers of each chunk, uint16, in a buffer that the next chunk overwrites."""
    c, odd = _scratch(), offset & 1
    k2 = torch.tensor(signed(key >> 32), **_INT32)
    starts = range(0, count, _CHUNK)
    counters = [signed(key + ((offset + start) // 2) * GOLDEN) for start in starts]
    k1s = torch.tensor(counters, **_INT32).unbind()
    for start, k1 in zip(starts, k1s, strict=True):
        size = min(count - start, _CHUNK)
        pairs = (size + odd + 1) // 2
        h, t = c.hash[:pairs], c.shifted[:pairs]
        torch.add(c.products[:pairs], k1, out=h)
        torch.bitwise_right_shift(h, c.by_16, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_16)).mul_(c.multiply_1)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17)).bitwise_xor_(k2).mul_(c.multiply_2)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17))
        # Little-endian: the low half of a number belongs to the even element.
        yield slice(start, start + size), h.view(torch.uint16)[odd : odd + size]


def numbers_(out: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Write the random numbers of `round_`, 16 bits each, to flat int32 `out`."""
    if not is_on_host(out):
        out.copy_(_numbers_at_once(out, key, offset, width or out.numel(), stride))
        return
    for row, out_row in enumerate(out.split(width or out.numel())):
        for here, numbers in _numbers_by_chunk(out_row.numel(), key, offset + row * stride):
            out_row[here].copy_(numbers)


def _round_at_once(out: Tensor, x: Tensor, key: int, offset: int, width: int, stride: int) -> None:
    """Round all in a few calls. Values past BF16's maximum get half a unit added to their bits, and inf stays inf."""
    bits = reinterpreted(x, torch.int32)
    sums = torch.where(x.abs() <= BF16_MAX, _numbers_at_once(x, key, offset, width, stride), 0x8000).add_(bits)
    sums = torch.where(x.isnan(), bits | 0x400000, sums)
    out.copy_(reinterpreted(shifted(sums, 16).to(torch.int16), torch.bfloat16))


def _numbers_at_once(like: Tensor, key: int, offset: int, width: int, stride: int) -> Tensor:
    """Return the numbers of as many elements as `like` has."""
    count, odd = like.numel(), offset & 1
    if width < count:  # an element of its own for each number: pairs may begin anywhere in a row
        at = _counted(like, count, torch.int64)
        element = at.div(width, rounding_mode="floor").mul_(stride).add_(at.remainder_(width)).add_(offset)
        h = _mixed_at_once(element.div(2, rounding_mode="floor").to(torch.int32), key, key >> 32)
        return torch.where(element.remainder_(2) == 0, h, shifted(h, 16)).bitwise_and_(0xFFFF)
    pairs = (count + odd + 1) // 2
    h = _mixed_at_once(_counted(like, pairs, torch.int32), key + (offset >> 1) * GOLDEN, key >> 32)
    return torch.stack((h & 0xFFFF, shifted(h, 16).bitwise_and_(0xFFFF)), -1).view(-1)[odd : odd + count]


def _counted(like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return 0 ... `count - 1` where `like` is; `out` makes it a fake tensor beside one."""
    return torch.arange(count, out=like.new_empty(count, dtype=dtype), device=like.device)


def _mixed_at_once(pairs: Tensor, k1: int, k2: int) -> Tensor:
    """Return the hashes of pairs, given their indices."""
    keys: Sequence[Any] = (signed(k1), signed(k2))  # Python numbers, since a tensor would be a copy to the device
    if is_lazy(pairs):  # and data on XLA, where one compiled graph serves every step
        keys = torch.tensor(keys, dtype=torch.int32, device=pairs.device).unbind()
    h = pairs.mul_(signed(GOLDEN)).add_(keys[0])
    h = h.bitwise_xor_(shifted(h, 16).bitwise_and_(0xFFFF)).mul_(MULTIPLY_1)
    h = h.bitwise_xor_(shifted(h, 15).bitwise_and_(0x1FFFF)).bitwise_xor_(keys[1]).mul_(MULTIPLY_2)
    return h.bitwise_xor_(shifted(h, 15).bitwise_and_(0x1FFFF))


def _quiet(x: Tensor) -> Tensor:
    """Return the BF16 quiet NaN with the sign and upper payload of an FP32 NaN; torch's own cast drops them."""
    return (x.view(torch.int32) >> 16).to(torch.int16).bitwise_or_(0x40).view(torch.bfloat16)
