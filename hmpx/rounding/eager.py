"""The rounding kernel in eager torch: any device, no compiler, and no look at a value on an accelerator.

On a CPU it goes through the cache's size at a time. On an accelerator each call costs as much as some hundred thousand
elements: there it rounds a tensor of any size in some 26 calls; XLA's compiler fuses them. XLA flushes numbers below
BF16's normal range to zero where it likes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hmpx.rounding.devices import is_lazy, is_on_host, reinterpreted, shifted

Tensor = torch.Tensor

GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97
BF16_MAX = torch.finfo(torch.bfloat16).max
_CHUNK = 1 << 17  # elements: few enough for the cache, enough for two threads


def signed(x: int) -> int:
    """Return the int32 with the low 32 bits of `x`."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


def round_(out: Tensor, x: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Round float32 `x` into bfloat16 `out`: equal shapes, contiguous, within one key.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    out, x = out.view(-1), x.view(-1)
    for here, *place in _parts(x, offset, width or x.numel(), stride):
        _round_at_once(out[here], x[here], key, *place)


def numbers_(out: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Write the random numbers of `round_`, 16 bits each, to flat int32 `out`."""
    for here, *place in _parts(out, offset, width or out.numel(), stride):
        out[here].copy_(_numbers_at_once(out[here], key, *place))


def _parts(like: Tensor, offset: int, width: int, stride: int) -> Iterator[tuple[slice, int, int, int]]:
    """Yield what is worked out at a time, with its offset, width and stride."""
    if not is_on_host(like):
        yield slice(None), offset, width, stride
        return
    for row, begin in enumerate(range(0, like.numel(), max(width, 1))):
        for column in range(0, width, _CHUNK):
            size = min(_CHUNK, width - column)
            yield slice(begin + column, begin + column + size), offset + row * stride + column, size, 0


def _round_at_once(out: Tensor, x: Tensor, key: int, offset: int, width: int, stride: int) -> None:
    """Round all in a few calls. Values past BF16's maximum get half a unit added to their bits, and inf stays inf."""
    bits, sums = reinterpreted(x, torch.int32), _numbers_at_once(x, key, offset, width, stride)
    if is_on_host(x) and torch.dot(x, x).item() < 1e38:  # no inf, no NaN, and no number past BF16's maximum
        out.view(torch.int16).copy_(sums.add_(bits).bitwise_right_shift_(16))
        return
    sums = torch.where(x.abs() <= BF16_MAX, sums, 0x8000).add_(bits)
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
    if is_on_host(like):  # little-endian: the low half of a number belongs to the even element
        return h.view(torch.uint16)[odd : odd + count].to(torch.int32)
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
