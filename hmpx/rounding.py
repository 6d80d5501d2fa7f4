"""Stochastic rounding of FP32 to BF16, by numbers that anybody can recompute.

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

A value that BF16 can hold stays itself. inf, NaN and finite values past BF16's maximum round to nearest; NaN stays NaN.

Sources: the 32-bit mixer is of the family searched by Wellons, "Prospecting for hash functions" (2018); splitmix64 is
Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014); stochastic rounding for training
is Gupta et al., "Deep learning with limited numerical precision" (ICML 2015).
"""

from __future__ import annotations

import functools
import hashlib
import threading

import torch

from hmpx.errors import HmpxError

Tensor = torch.Tensor

_M64 = 2**64 - 1
_GOLDEN, _MULTIPLY_1, _MULTIPLY_2 = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97
_BF16_MAX = torch.finfo(torch.bfloat16).max
_CHUNK = 32768  # elements: up to this many, torch's CPU kernels stay on one thread and out of OpenMP


def _splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & _M64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _M64
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=65536)
def name_id(name: str) -> int:
    """The 64 bits that stand for a parameter's name in the key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def derive_key(seed: int, step: int, name: str, high: int = 0) -> int:
    """The 64-bit key of the elements whose index has `high` above its low 32 bits."""
    key = 0
    for value in (seed, step, name_id(name), high):
        key = _splitmix64(key ^ (value & _M64))
    return key


def check_seed(seed: int) -> int:
    """`seed` itself, if it is an integer in [0, 2^64)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _M64:
        raise HmpxError(f"seed {seed!r} is out of range: an integer from 0 to 2**64 - 1")
    return seed


def stochastic_round(x: Tensor, *, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """Round an FP32 tensor to BF16 stochastically.

    Args:
        x: float32, any shape and device.
        seed, step, name: what the numbers depend on; integers in [0, 2^64) and any string.
        offset: index of the first element of `x` in the whole (unsharded, flattened) parameter.

    Returns:
        bfloat16, the shape of `x`, contiguous. Element `e` of the whole parameter gets the same bits however it is cut.

    Raises:
        HmpxError: `x` is not float32, or a number is out of range.
    """
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    stochastic_round_(out, x, seed=seed, step=step, name=name, offset=offset)
    return out


def stochastic_round_(out: Tensor, x: Tensor, *, seed: int, step: int, name: str, offset: int = 0) -> Tensor:
    """`stochastic_round` into an existing bfloat16 tensor of the same shape, contiguous or not. Returns `out`."""
    if x.dtype is not torch.float32 or out.dtype is not torch.bfloat16:
        raise HmpxError(f"stochastic rounding goes from float32 to bfloat16, not from {x.dtype} to {out.dtype}")
    if x.shape != out.shape:
        raise HmpxError(f"the shapes differ: {tuple(x.shape)} into {tuple(out.shape)}")
    check_seed(seed)
    if step < 0 or offset < 0:
        raise HmpxError(f"step and offset count from 0, not {step} and {offset}")
    with torch.no_grad():
        target = out.detach()
        flat = target.view(-1) if target.is_contiguous() else torch.empty(x.numel(), dtype=out.dtype, device=x.device)
        source = x.detach().contiguous().view(-1)
        done = 0
        while done < source.numel():
            # One key serves 2^32 elements; a parameter may be longer than that, or a slice may cross the border.
            high, low = divmod(offset + done, 2**32)
            count = min(source.numel() - done, 2**32 - low)
            key = derive_key(seed, step, name, high)
            _round_eager(flat[done : done + count], source[done : done + count], key, low)
            done += count
        if not target.is_contiguous():
            target.copy_(flat.view(x.shape))
    return out


def _signed(x: int) -> int:
    """The int32 with the low 32 bits of `x`."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


class _Scratch:
    """Buffers and constants of the eager kernel on one device, in one thread.

    In eager torch a 0-dim tensor is a cheaper operand than a Python number. `>>` on int32 is arithmetic, so every shift
    is masked afterwards; without the mask the hash is two-to-one.
    """

    def __init__(self, device: torch.device) -> None:
        half = _CHUNK // 2 + 1

        def constant(value: int) -> Tensor:
            return torch.tensor(_signed(value), dtype=torch.int32, device=device)

        self.products = torch.arange(half, dtype=torch.int32, device=device).mul_(_signed(_GOLDEN))
        self.hash = torch.empty(half, dtype=torch.int32, device=device)
        self.shifted = torch.empty(half, dtype=torch.int32, device=device)
        self.bits = torch.empty(_CHUNK, dtype=torch.int32, device=device)
        self.by_15, self.by_16 = constant(15), constant(16)
        self.low_17, self.low_16 = constant(0x1FFFF), constant(0xFFFF)
        self.multiply_1, self.multiply_2 = constant(_MULTIPLY_1), constant(_MULTIPLY_2)
        self.high_16 = constant(0xFFFF0000)


_local = threading.local()


def _scratch(device: torch.device) -> _Scratch:
    cache = _local.__dict__.setdefault("scratch", {})
    if device not in cache:
        cache[device] = _Scratch(device)
    return cache[device]


def _round_eager(out: Tensor, x: Tensor, key: int, offset: int) -> None:
    """The kernel in eager torch, any device. `out` bfloat16 and `x` float32: flat, contiguous, within one key."""
    c = _scratch(x.device)
    odd = offset & 1
    k2 = torch.tensor(_signed(key >> 32), dtype=torch.int32, device=x.device)
    keys = [_signed(key + ((offset + start) // 2) * _GOLDEN) for start in range(0, x.numel(), _CHUNK)]
    first_keys = torch.tensor(keys, dtype=torch.int32, device=x.device).unbind()
    # A finite sum of squares below the square of BF16's maximum proves that nothing needs the special road.
    special = not torch.dot(x, x).item() < 1e38
    for k1, x_chunk, out_chunk in zip(first_keys, x.split(_CHUNK), out.split(_CHUNK), strict=True):
        count = x_chunk.numel()
        pairs = (count + odd + 1) // 2
        h, t, bits = c.hash[:pairs], c.shifted[:pairs], c.bits[:count]
        torch.add(c.products[:pairs], k1, out=h)
        torch.bitwise_right_shift(h, c.by_16, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_16)).mul_(c.multiply_1)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17)).bitwise_xor_(k2).mul_(c.multiply_2)
        torch.bitwise_right_shift(h, c.by_15, out=t)
        h.bitwise_xor_(t.bitwise_and_(c.low_17))
        bits.copy_(h.view(torch.uint16)[odd : odd + count])  # little-endian: the low half belongs to the even element
        bits.add_(x_chunk.view(torch.int32)).bitwise_and_(c.high_16)
        out_chunk.copy_(bits.view(torch.float32))
        if special:
            out_chunk.copy_(torch.where(x_chunk.abs() <= _BF16_MAX, out_chunk, x_chunk.to(torch.bfloat16)))
