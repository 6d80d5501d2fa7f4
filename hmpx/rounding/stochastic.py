"""Stochastic rounding of FP32 to BF16, and masters in two halves. Random numbers follow from seed, step, name, index.

**The problem.** A BF16 weight has 8 bits of precision. An update smaller than half a unit in the last place rounds to
nothing under round-to-nearest, every time, and training stalls. Rounding up with a probability equal to the part that
is cut off keeps the expected value right.

**The numbers.** Other libraries draw them from the global generator, so replicas drift apart and a resumed run differs.
Here the number of an element depends on (seed, step, parameter name, index in the whole parameter) and nothing else.
All of it is uint32 with logical shifts and wraparound, except the key, which is uint64::

    key    = chain over seed, step, blake2b-64(name), e >> 32       each link splitmix64(previous ^ value)
    k1, k2 = low and high 32 bits of key
    i      = (e mod 2^32) >> 1                                      e: row-major index in the whole parameter
    h      = i * 0x9E3779B9 + k1
    h ^= h >> 16;  h *= 0x21F0AAAD;  h ^= h >> 15;  h ^= k2;  h *= 0x735A2D97;  h ^= h >> 15
    r      = low 16 bits of h for even e, high 16 bits for odd e
    out    = bf16 with the bits (bits(x) + r) >> 16

The index is multiplied before a key comes in: a counter under a key by XOR alone failed tests of pairs.

A value that BF16 can hold stays itself. inf and finite values past BF16's maximum round to nearest. NaN stays NaN: its
upper 16 bits with the quiet bit (0x40) set.

**Halves.** A master is held as a BF16 weight and an integer beside it, an int16 without loss::

    upper  = (bits + 0x8000) >> 16        the number rounded to nearest, ties away from zero
    lower  = int16(bits)
    bits   = (upper << 16) + lower

Exact for every number and for inf. NaN stays NaN in the upper half and in the whole; payloads that rounding would carry
out of the NaNs become the quiet NaN's. An upper half that somebody has written keeps the lower half that is there;
beside a written 0 or inf it is left out where it would make a NaN.

With an int8 beside it, a number has 24 bits: ``bits = (upper << 16) + (lower << 8)``. FP32 numbers are rounded to it
stochastically, ``(bits + (r >> 8)) & ~0xFF``; those past the largest one are cut off.

Sources: the 32-bit mixer is of the family searched by Wellons, "Prospecting for hash functions" (2018); splitmix64 is
Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); stochastic rounding for training
is Gupta et al., "Deep learning with limited numerical precision" (ICML 2015).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hmpx.base.tensors import is_lazy, is_on_host
from hmpx.errors import HmpxError
from hmpx.rounding.devices import kernels_for, reinterpreted, shifted
from hmpx.rounding.shared import MAX_UINT64, Keys, Span, derive_key
from hmpx.rounding.table import TableRow, launch_once, row_of_rounding

Tensor = torch.Tensor


class Rounding(NamedTuple):
    """FP32 `x` to round into BF16 `out`, of the same shape; `spans`: where its elements lie in the parameter `name`."""

    out: Tensor
    x: Tensor
    name: str
    spans: Sequence[Span]


def check_seed(seed: int) -> int:
    """Return `seed` if it is an integer in [0, 2^64).

    Raises:
        HmpxError: it is something else.
    """
    return _check_number("seed", seed)


def _check_number(what: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= MAX_UINT64:
        raise HmpxError(f"{what} {number!r} is out of range: an integer from 0 to 2**64 - 1")
    return number


def stochastic_round(x: Tensor, *, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """Round an FP32 tensor to BF16 stochastically.

    Args:
        x: float32, any shape and device.
        seed, step, name: what the numbers depend on; integers in [0, 2^64) and any string.
        offset: index of the first element of `x` in the whole (unsharded, flattened) parameter.

    Returns:
        bfloat16, the shape of `x`, contiguous. Element `e` of the whole parameter gets the same bits however it is cut.

    Raises:
        HmpxError: `x` is not float32, or a number is out of range, that of an element included.

    Example:
        >>> x = torch.full((100_000,), 1 + 2**-9)  # a quarter of the way from 1 to the next BF16 number, 1 + 2**-7
        >>> rounded = hmpx.stochastic_round(x, seed=0, step=0, name="x")
        >>> rounded.dtype, sorted(set(rounded.tolist()))
        (torch.bfloat16, [1.0, 1.0078125])
        >>> abs((rounded > 1).float().mean().item() - 0.25) < 0.01
        True
    """
    if not isinstance(x, Tensor):
        raise HmpxError(f"stochastic rounding takes tensors, not {type(x).__name__}")
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    stochastic_round_(out, x, seed=seed, step=step, name=name, offset=offset)
    return out


def stochastic_round_(out: Tensor, x: Tensor, *, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """Round stochastically into an existing bfloat16 tensor of the same shape, contiguous or not; return `out`.

    Example:
        >>> average, weight = torch.zeros(3, dtype=torch.bfloat16), torch.ones(3)
        >>> for step in range(10):
        ...     _ = hmpx.stochastic_round_(average, average.float().lerp(weight, 0.5), seed=0, step=step, name="ema")
        >>> average.dtype
        torch.bfloat16
    """
    if not isinstance(x, Tensor) or not isinstance(out, Tensor):
        raise HmpxError(f"stochastic rounding takes tensors, not {type(x).__name__}")
    if not isinstance(name, str):
        raise HmpxError(f"the name is {name!r}, not a string")
    if x.dtype is not torch.float32 or out.dtype is not torch.bfloat16:
        raise HmpxError(f"stochastic rounding goes from float32 to bfloat16, not from {x.dtype} to {out.dtype}")
    if x.shape != out.shape:
        raise HmpxError(f"the shapes differ: {tuple(x.shape)} into {tuple(out.shape)}")
    for what, number in (("seed", seed), ("step", step), ("offset", offset)):
        _check_number(what, number)
    if offset + x.numel() > 2**64:
        raise HmpxError(
            f"offset {offset} and {x.numel()} elements reach past element 2**64 - 1, the last one that has a number"
        )
    with torch.no_grad():
        spans = [Span(0, x.numel(), offset, max(x.numel(), 1), 0)]
        round_all([Rounding(out.detach(), x.detach(), name, spans)], seed, step)
    return out


def round_all(roundings: Iterable[Rounding], seed: int, step: int) -> None:
    """Round many tensors under `torch.no_grad()`: in one kernel call for each device where kernels can read them."""
    together: dict[torch.device, tuple[ModuleType, list[TableRow]]] = {}
    copied: list[tuple[Tensor, Tensor]] = []
    for out, x, name, spans in roundings:
        source = x.contiguous()
        target = out if out.is_contiguous() else torch.empty_like(source, dtype=out.dtype)
        kernels, flat, bits = kernels_for(source, target), source.view(-1), target.view(-1)
        for span in spans:
            for start, stop, offset, *rows in span.within_keys():
                key, at = derive_key(seed, step, name, offset >> 32), offset % 2**32
                if kernels is None:
                    round_(bits[start:stop], flat[start:stop], key, at, *rows)
                else:
                    row = row_of_rounding(bits[start:stop], flat[start:stop], key, at, *rows)
                    together.setdefault(x.device, (kernels, []))[1].append(row)
        if target is not out:
            copied.append((out, target))
        elif kernels is not None and flat.numel():
            torch.autograd.graph.increment_version(out)  # autograd sees no write of our kernels
    for kernels, table_rows in together.values():
        launch_once(kernels, table_rows)
    for out, target in copied:
        out.copy_(target)


def random_numbers(like: Tensor, spans: Sequence[Span], keys: Keys) -> Tensor:
    """Return the random numbers by which the elements of a flat tensor are rounded: r above, in int32."""
    out = torch.empty(like.numel(), dtype=torch.int32, device=like.device)
    for span in spans:
        for start, stop, offset, width, stride in span.within_keys():
            numbers_(out[start:stop], derive_key(*keys, offset >> 32), offset % 2**32, width, stride)
    return out


# Rounding in torch's operators, without a look at a value on an accelerator. On a CPU it goes through the cache's size
# at a time. On an accelerator each call costs as much as some hundred thousand elements: a tensor of any size takes
# some 26 calls there; XLA's compiler fuses them. XLA flushes numbers below BF16's normal range to zero where it likes.

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
    """Yield the parts that are rounded one after the other, each with its offset, width and stride."""
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
    # Each mask takes away the signs that int32 shifts bring in: with them the hash would be two to one.
    h = pairs.mul_(signed(GOLDEN)).add_(keys[0])
    h = h.bitwise_xor_(shifted(h, 16).bitwise_and_(0xFFFF)).mul_(MULTIPLY_1)
    h = h.bitwise_xor_(shifted(h, 15).bitwise_and_(0x1FFFF)).bitwise_xor_(keys[1]).mul_(MULTIPLY_2)
    return h.bitwise_xor_(shifted(h, 15).bitwise_and_(0x1FFFF))


# Halves in torch's operators, on any device. All functions want `torch.no_grad()`.


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
