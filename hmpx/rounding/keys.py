"""The keys of stochastic rounding: a chain over seed, step, name and the upper half of an index. See `stochastic`."""

from __future__ import annotations

import functools
import hashlib

MAX_UINT64 = 2**64 - 1


def _splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MAX_UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MAX_UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MAX_UINT64
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=65536)
def name_id(name: str) -> int:
    """The 64 bits that stand for a parameter's name in the key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=64)
def step_key(seed: int, step: int) -> int:
    """The part of the chain that is the same for a whole step."""
    return _splitmix64(_splitmix64(seed) ^ (step & MAX_UINT64))


def key_of(step_key: int, name: int, high: int = 0) -> int:
    """The 64-bit key of the elements whose index has `high` above its low 32 bits; `name` is a `name_id`."""
    return _splitmix64(_splitmix64(step_key ^ name) ^ high)


def derive_key(seed: int, step: int, name: str, high: int = 0) -> int:
    """`key_of` a seed, a step and a name."""
    return key_of(step_key(seed, step), name_id(name), high)
