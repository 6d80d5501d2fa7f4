"""What tune chooses between: BF16 and FP32, or FP8 and BF16."""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog

Low = Literal["bf16", "fp8"]


class Level(NamedTuple):
    """The two sides of a choice.

    low, wide: the lists. low_dtype, wide_dtype: what `Choice.dtype` says.
    """

    low: Low
    wide: str
    low_dtype: str
    wide_dtype: str

    @property
    def words(self) -> str:
        """The low side, for a sentence."""
        return self.low.upper()

    @property
    def wide_words(self) -> str:
        return self.wide.upper()

    @property
    def all_wide(self) -> str:
        """What a mark of a plot is called that has nothing in the low list."""
        return f"all in {self.wide_words}"


LEVELS = {"bf16": Level("bf16", "fp32", "bfloat16", "float32"), "fp8": Level("fp8", "bf16", "float8", "bfloat16")}


@functools.cache
def decidable(level: Level = LEVELS["bf16"]) -> frozenset[str]:
    """The names that tune puts into a list: of ops that make new values, or that have an FP8 product."""
    if level.low == "fp8":
        return frozenset(op_facts.MATRIX_PRODUCTS)
    return frozenset(name for name, op in catalog().items() if op.computes and not op.view and name[0] != "_")
