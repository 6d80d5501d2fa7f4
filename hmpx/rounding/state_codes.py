"""The codes in which optimizer state can be held, by the value of `state_dtype`, and the names of what is held.

A state tensor stands in the state of its parameter as codes and scales, under names that no optimizer knows. To add a
code, derive a class from `StateCode` and name it here.
"""

from __future__ import annotations

from typing import Any

from hmpx.rounding.coding import CodeName, StateCode
from hmpx.rounding.eight_bits import EIGHT_BITS, FP8
from hmpx.rounding.four_bit_codes import FOUR_BITS

STATE_CODES: dict[CodeName, StateCode] = {code.name: code for code in (EIGHT_BITS, FP8, FOUR_BITS)}
SCALES = "hmpx_scales_"  # before the optimizer's own name of a state tensor
_PREFIXES = {code.prefix: code for code in STATE_CODES.values()}


def code_of(key: Any) -> StateCode | None:
    """Return the code of which `key` names codes in the state of a parameter; None if it names something else."""
    if not isinstance(key, str) or not key.startswith("hmpx_"):
        return None
    return next((code for prefix, code in _PREFIXES.items() if key.startswith(prefix)), None)
