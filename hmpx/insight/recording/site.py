"""The record of one call site, used by `hmpx.record` and every view of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hmpx.insight.recording.words import size, times

SHAPES = 8  # how many different ones are kept of one site


@dataclass
class Site:
    """The calls of one op from one line, in one module, that came in the same dtypes.

    Attributes:
        op: its name in op lists; "to" is a cast by hand. entry: the name it was called by.
        where: the line of the caller's code, as file:line. module: the dotted name of the module that called it, as in
            `named_modules()`; "" where it was called in none.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        given, seen, result: the floating dtypes that came in, those that the op ran on, and those that came out.
        calls: how many. shapes: of the tensors that came in, at most 8 different ones, as "32x64, 64".
        casts: tensors that were cast, by a rule or by hand. casts_avoided: those that a rule looked at and found right.
        bytes_cast: what the casts read and wrote. cast_seconds, op_seconds: in the casts, and in the op itself.
        nonfinite: the first call, from 1, whose result had an inf or a NaN that is not the -inf of a mask; None if none
            had. nonfinite_at: that call's number among those of all sites.
        fp8: of a site in FP8, for "inputs", "weights" and "gradients" the "largest" magnitude, and of how many
            "elements" how many "underflowed" to zero or "saturated"; complete when the region ends.
        in_low: why calls that are listed for FP8 were computed in BF16, and how many.
        unchosen: in words, why it ran in a dtype that nobody chose; "" where it did not.
    """

    op: str
    entry: str
    where: str
    module: str = ""
    rule: str = ""
    reason: str = ""
    given: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    calls: int = 0
    shapes: list[str] = field(default_factory=list)
    casts: int = 0
    casts_avoided: int = 0
    bytes_cast: int = 0
    cast_seconds: float = 0.0
    op_seconds: float = 0.0
    nonfinite: int | None = None
    nonfinite_at: int | None = None
    unchosen: str = ""
    fp8: dict[str, dict[str, float]] = field(default_factory=dict)
    in_low: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """In the casts and in the op."""
        return self.cast_seconds + self.op_seconds

    @property
    def dtypes(self) -> str:
        """The dtypes of arguments, of the op and of its result, each once: "float32 -> bfloat16"."""
        steps = [" and ".join(dict.fromkeys(dtypes)) for dtypes in (self.given, self.seen, self.result)]
        return " -> ".join(step for i, step in enumerate(steps) if step and (i == 0 or step != steps[i - 1]))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class RoundTrip:
    """A tensor that one line widened and another narrowed again, or the other way round.

    Attributes:
        first, then: the lines, as file:line. ops: what was called there. dtypes: the three that it went through.
        calls: how often. bytes: what the second cast read and wrote. listed: whether op lists ask for both.
    """

    first: str
    then: str
    ops: tuple[str, str]
    dtypes: tuple[str, str, str]
    calls: int = 0
    bytes: int = 0
    listed: bool = False

    def __str__(self) -> str:
        down, up = self.ops
        return (
            f"{self.first}: {down} makes {self.dtypes[1]} of {self.dtypes[0]}, and {self.then}: {up} makes it "
            f"{self.dtypes[2]} again ({times(self.calls)}, {size(self.bytes)})"
        )
