"""`Row`: one call site under the lists, beside itself in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hmpx.insight.recording.words import short_places

BROKEN = 0.1  # gradient error in units of the noise between batches; healthy ops lie at 0.001 to 0.01


@dataclass(frozen=True)
class Row:
    """One call site under the lists beside itself in FP32; or the sum over an op or a module.

    Attributes:
        op: its list name; "to" is a cast by hand. where: the caller's line, as file:line. module: the dotted name of
            the module that called it.
        rule: "bf16", "fp16", "fp32", "promote", "first input", or "" where none acted. reason: why, in words.
        dtypes: what came in, what the op ran on, and what came out.
        calls: how many, over all batches.
        error: relative L2 error of the op alone: its FP32 inputs, cast as the lists say, beside the same in FP32.
        accumulated: relative L2 error of its result in the run under the lists, against that of the run in FP32.
        ulp: the largest error of the op alone, in units in the last place of the low dtype.
        bias, spread: mean and standard deviation of that error, in units of the result's root mean square.
        loss_change: what the error of the op alone does to the loss, to first order: root mean square over batches.
        gradient_error: what it does to the gradients of the parameters, in units of the noise between batches.
        gradient_bias: the part that batches do not average out, in units of the noise of their mean.
        measured: whether loss_change and gradient_error come from runs with this op alone in low precision, of a batch
            or more, those in which it looks worst first. Else they are estimates, the second right within a factor of
            two or so.
        nonfinite: results that are not finite under the lists, and finite in FP32. phase: "forward" or "backward",
            where that begins. mended: whether FP32 at this op alone keeps everything finite; None where it was not
            tried.
        note: what else there is to say, in words.

        is_broken: whether it breaks the training by itself, as far as is known.

    What does not exist is NaN: the effect on a loss where there is none, noise where there is one batch.

    Example:
        >>> batches = [(torch.randn(8, 4),) for _ in range(2)]
        >>> found = hmpx.compare(model, batches, lambda model, x: model(x).square().mean())
        >>> row = found.rows[0]
        >>> row.op, row.rule, row.calls, row.error < 0.01, row.is_broken
        ('linear', 'bf16', 2, True, False)
    """

    op: str
    where: str = ""
    module: str = ""
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    calls: int = 0
    error: float = 0.0
    accumulated: float = 0.0
    ulp: float = 0.0
    bias: float = 0.0
    spread: float = 0.0
    loss_change: float = math.nan
    gradient_error: float = math.nan
    gradient_bias: float = math.nan
    measured: bool = False
    nonfinite: int = 0
    phase: str = ""
    mended: bool | None = None
    note: str = ""

    @property
    def is_broken(self) -> bool:
        """Whether it breaks the training by itself, as far as is known."""
        return bool(self.phase) or self.gradient_error >= BROKEN

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        inside = f" in {self.module}" if self.module else ""
        effect = f"gradient error {number(self.gradient_error)} of the noise, loss {number(self.loss_change)}"
        if self.phase:
            effect = f"not finite in the {self.phase} pass, where FP32 is"
        return short_places(f"{place}{self.op}{inside}: {effect}, error of the op alone {number(self.error)}")


def number(value: float) -> str:
    """With two figures; "-" for what does not exist."""
    return "-" if math.isnan(value) else "0" if value == 0 else f"{value:.1e}"
