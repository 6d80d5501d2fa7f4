"""`Confirmed`: a short training under the lists, beside FP32."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from hmpx.insight.tuning.course import Course, check_scale, distance
from hmpx.recipes.recipe import Recipe

MAKE = functools.partial(torch.optim.AdamW, lr=1e-3)  # where no optimizer is given


@dataclass(frozen=True)
class Confirmed:
    """A short training under the lists that were found, beside two in FP32 that see the batches in other orders.

    Attributes:
        steps: of each of the three.
        error: how far the losses come from those of the FP32 run with the same order: root mean square, in units of how
            far the other order comes from them. bias: the mean of the differences; above zero, losses are larger.
        loss: mean over some batches at the end. fp32_losses: of the two runs in FP32.
        holds: whether it is no farther from FP32 than another order of the batches is, and the bias is at most half of
            that.

    Example:
        >>> hmpx.Confirmed(steps=100, error=0.08, bias=-0.01, loss=2.31, fp32_losses=(2.31, 2.35)).holds
        True
    """

    steps: int
    error: float
    bias: float
    loss: float
    fp32_losses: tuple[float, float]

    @property
    def holds(self) -> bool:
        """See above."""
        return self.error <= 1 and self.bias <= 0.5

    def __str__(self) -> str:
        exact, other = self.fp32_losses
        said = "no farther" if self.holds else "FARTHER"
        return (
            f"trained {self.steps} steps: the losses are {said} from FP32 than another order is. Their distance from "
            f"FP32 is {self.error:.2g}, in the mean {self.bias:+.2g}, where another order of the batches has 1. At the "
            f"end the loss is {self.loss:.4g}, in FP32 {exact:.4g}, in another order {other:.4g}"
        )


def confirmed(course: Course, recipe: Recipe) -> Confirmed:
    """Train under a recipe, and in FP32."""
    exact, other = course.run(None), course.run(None, order=1)
    check_scale(exact, other, "tune: confirm")
    losses = course.run(recipe)
    found = distance(losses, exact, other)
    ends: list[Any] = [float(each[-1].mean()) for each in (losses, exact, other)]
    return Confirmed(course.steps, found.error, found.bias, ends[0], (ends[1], ends[2]))
