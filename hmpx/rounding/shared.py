"""What Python, C and Triton must know alike: kinds of tensors, numbers of codes, keys of random numbers.

C gets numbers as it is compiled (`for_c`), Triton as constants. Keys depend on seed, step, name and on positions in the
whole parameter; `stochastic` specifies them, and `native.h` has them in C.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from hmpx.rounding import eager

KERNELS = tuple(eager.KERNELS)  # by number from 0
SCALARS = 12  # of a step, at most

# How a tensor is stored, by number from 0, and the half bytes of an element; `native_stored.c` says what each is.
# Behind these come the kinds of `FLOATS`.
HALF_BYTES = {"ABSENT": 0, "FP32": 8, "BF16": 4, "NEAREST": 4, "MASTER": 4, "SPLIT": 4, "SPLIT8": 4, "FOUR": 1}
ABSENT, FP32, BF16, NEAREST, MASTER, SPLIT, SPLIT8, FOUR = range(len(HALF_BYTES))
CodeName = Literal["8bit", "fp8", "4bit"]  # of state: those of `FLOATS`, and "4bit", which is FOUR


class FloatNumbers(NamedTuple):
    """A code of 8 bits that are floating-point numbers. Their scales are powers of two.

    Attributes:
        name, words, prefix: as of `coding.StateCode`.
        mantissa: the number of its bits.
        ones: the exponents of the number 1, in blocks that are nowhere negative and in signed ones.
        last: the code of the largest number less the code of 1; the codes of inf and NaN come next.
        has_inf: whether the code after the largest number is inf; else it is NaN.
    """

    name: CodeName
    words: str
    prefix: str
    mantissa: int
    ones: tuple[int, int]
    last: int
    has_inf: bool

    @property
    def shift(self) -> int:
        """The bits of an FP32 mantissa that a code lacks."""
        return 23 - self.mantissa

    @property
    def nan(self) -> int:
        """The code of NaN less the code of 1."""
        return self.last + 1 + self.has_inf

    def number(self, after_one: int) -> float:
        """Return what a code means, for a scale of 1; given is by how much it is past the code of 1."""
        exponent, mantissa = divmod(after_one, 1 << self.mantissa)
        return 2.0**exponent * (1 + mantissa / (1 << self.mantissa))


_FLOATS = (
    FloatNumbers("8bit", "8 bits", "hmpx_codes_", mantissa=4, ones=(15, 7), last=13, has_inf=True),
    FloatNumbers("fp8", "float8_e4m3fn", "hmpx_fp8_", mantissa=3, ones=(7, 7), last=70, has_inf=False),
)
FLOATS = dict(enumerate(_FLOATS, len(HALF_BYTES)))  # by kind; C and Triton make loops and branches of each
CODES = (*range(FOUR, len(HALF_BYTES)), *FLOATS)  # kinds that are codes with scales: all from FOUR on

# The numbers that codes of 4 bits mean, as torchao computes them; see `state_codes.py`.
_ABOVE = 0.0055, 0.0325000025331974, 0.0775, 0.21249999105930328, 0.4375, 0.6625, 0.8875
SIXTEEN = (*(-number for number in reversed(_ABOVE)), 0.0, *_ABOVE, 1.0)


def for_c() -> tuple[str, ...]:
    """Return the options of a C compiler that define kernels, kinds and the numbers of codes."""
    defined = {
        "KINDS": _listed(HALF_BYTES),
        "HALF_BYTES": _listed([*HALF_BYTES.values(), *(2 for _ in FLOATS)]),
        "SCALARS": SCALARS,
        "NUMBERS_OF_FOUR": _listed(f"{number}f" for number in SIXTEEN),
        "FOR_EACH_KERNEL(DO)": " ".join(f"DO({name})" for name in KERNELS),
        "FOR_EACH_FLOAT(DO)": " ".join(
            f"DO({_listed((kind, of.shift, *of.ones, of.last, of.last + 1, of.nan))})" for kind, of in FLOATS.items()
        ),
    }
    return tuple(f"-D{name}={value}" for name, value in defined.items())


def _listed(values: Iterable[object]) -> str:
    return ",".join(map(str, values))


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
