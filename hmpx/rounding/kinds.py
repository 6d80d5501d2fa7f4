"""What Python, C and Triton must know alike: kernels and their scalars, kinds of tensors, the numbers of codes.

C gets them as it is compiled (`for_c`), Triton as constants.
"""

from __future__ import annotations

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
    """Return the options of a C compiler that define all of this."""
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
