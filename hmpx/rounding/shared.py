"""What Python, C and Triton must know alike: kernels, kinds of tensors, numbers of codes, keys of random numbers.

C gets numbers as it is compiled (`for_c`), Triton as constants. Keys depend on seed, step, name and on positions in the
whole parameter; `stochastic` specifies them, and `native.h` has them in C.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

# The kernels of `native_steps.c` and the scalars of each, in the order in which C and Triton read them.
SCALARS_OF = {
    "adam": ("sign", "l2", "decay", "beta1", "rest1", "beta2", "rest2", "rate", "eps"),
    "sgd": ("sign", "l2", "rate", "momentum", "keep", "add", "nesterov"),
    "lion": ("sign", "l2", "decay", "beta1", "rest1", "beta2", "rest2", "rate"),
    "adagrad": ("sign", "l2", "rate", "eps"),
    "rmsprop": ("sign", "l2", "rate", "alpha", "rest", "eps", "momentum", "centered"),
    "nadam": ("sign", "l2", "decay", "rest1", "beta2", "rest2", "rate", "rate_mean", "eps", "correction"),
}
KERNELS = tuple(SCALARS_OF)
SCALARS = 12  # of a step, at most

# How a tensor is stored, by number from 0, and the half bytes of an element; `native_stored.c` says what each is.
HALF_BYTES = {
    **{"ABSENT": 0, "FP32": 8, "BF16": 4, "CODED": 2, "NEAREST": 4},
    **{"MASTER": 4, "SPLIT": 4, "SPLIT8": 4, "FP8": 2, "FOUR": 1},
}
ABSENT, FP32, BF16, CODED, NEAREST, MASTER, SPLIT, SPLIT8, FP8, FOUR = range(len(HALF_BYTES))
CODES = CODED, FP8, FOUR  # kinds that are codes with scales


class FloatNumbers(NamedTuple):
    """What tells a `state_codes.FloatCode` of 8 bits from another; that class says what each number is."""

    mantissa: int
    ones: tuple[int, int]
    last: int
    has_inf: bool

    @property
    def shift(self) -> int:
        """The bits of an FP32 mantissa that a code lacks."""
        return 23 - self.mantissa


FLOATS = {CODED: FloatNumbers(4, (15, 7), 13, True), FP8: FloatNumbers(3, (7, 7), 70, False)}

# The numbers that codes of 4 bits mean, as torchao computes them; see `state_codes.py`.
_ABOVE = 0.0055, 0.0325000025331974, 0.0775, 0.21249999105930328, 0.4375, 0.6625, 0.8875
SIXTEEN = (*(-number for number in reversed(_ABOVE)), 0.0, *_ABOVE, 1.0)


def for_c() -> tuple[str, ...]:
    """Return the options of a C compiler that define kernels, kinds and the numbers of codes."""
    floats = {
        kind: (each.shift, *each.ones, each.last, each.last + 1, each.last + 1 + each.has_inf)
        for kind, each in FLOATS.items()
    }
    lists = {
        "KINDS": HALF_BYTES,
        "HALF_BYTES": HALF_BYTES.values(),
        "SCALARS": (SCALARS,),
        "NUMBERS_OF_CODED": floats[CODED],
        "NUMBERS_OF_FP8": floats[FP8],
        "NUMBERS_OF_FOUR": [f"{number}f" for number in SIXTEEN],
    }
    kernels = " ".join(f"DO({name})" for name in KERNELS)
    return f"-DFOR_EACH_KERNEL(DO)={kernels}", *(f"-D{name}={','.join(map(str, of))}" for name, of in lists.items())


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
