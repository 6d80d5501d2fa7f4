"""What the random numbers of stochastic rounding depend on: keys, and positions in the whole parameter.

`stochastic` specifies both.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

MAX_UINT64 = 2**64 - 1
Keys = tuple[int, int, str]  # seed, step, name


def _splitmix64(x: int) -> int:
    z = (x + 0x9E3779B97F4A7C15) & MAX_UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MAX_UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MAX_UINT64
    return z ^ (z >> 31)


@functools.lru_cache(maxsize=65536)
def name_id(name: str) -> int:
    """Return the 64 bits that stand for a parameter's name in the key."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@functools.lru_cache(maxsize=64)
def step_key(seed: int, step: int) -> int:
    """Return the part of the chain that is the same for a whole step."""
    return _splitmix64(_splitmix64(seed) ^ (step & MAX_UINT64))


def key_of(step_key: int, name: int, high: int = 0) -> int:
    """Return the 64-bit key of elements whose index has `high` above its low 32 bits; `name` is a `name_id`."""
    return _splitmix64(_splitmix64(step_key ^ name) ^ high)


def derive_key(seed: int, step: int, name: str, high: int = 0) -> int:
    """Return `key_of` a seed, a step and a name."""
    return key_of(step_key(seed, step), name_id(name), high)


class Span(NamedTuple):
    """Elements `start` to `stop` of a flat tensor, and where they lie in the whole parameter.

    They are rows of `width` elements. Rows begin `stride` elements apart in the parameter, the first one at `offset`.
    """

    start: int
    stop: int
    offset: int
    width: int
    stride: int

    def within_keys(self) -> Iterator[Span]:
        """Cut the span so that each part has one key: each 2^32 elements of a parameter have a key of their own."""
        start, stop, offset, width, stride = self
        while start < stop:
            width = min(width, stop - start)
            room, rows = 2**32 - offset % 2**32, (stop - start) // width
            if (rows - 1) * stride + width <= room:
                size, step = stop - start, 0
            elif rows == 1:
                size = step = room
            else:  # the rows that fit, or the first row, which is cut in turn
                fitting = max((room - width) // stride + 1, 1)
                size, step = fitting * width, fitting * stride
            part = Span(start, start + size, offset, width, stride)
            if size > width or width <= room:
                yield part
            else:
                yield from Span(start, start + size, offset, size, 0).within_keys()
            start, offset = start + size, offset + step
