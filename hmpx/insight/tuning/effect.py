"""`Effect`: what a choice of precisions changes in the gradients and in the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """What a choice of precisions changes, beside FP32.

    gradient_error: root mean square over batches, in units of the noise between batches. gradient_bias: the part of it
    that is the same in every batch, in the same units. loss_change: root mean square over batches; loss_error: that in
    units of the noise between the losses of batches. raised: the exception, where the program raises under this choice;
    every other figure is infinite then.
    """

    gradient_error: float
    gradient_bias: float
    loss_change: float
    loss_error: float
    raised: str = ""

    @property
    def size(self) -> float:
        """The one number that a tolerance bounds. The bias counts twice: it may be half of the tolerance."""
        found = max(self.gradient_error, 2 * self.gradient_bias, self.loss_error)
        return found if math.isfinite(self.gradient_error + self.loss_change) else math.inf

    def meets(self, tolerance: float) -> bool:
        """Whether it is within a tolerance."""
        return self.size <= tolerance


NOTHING = Effect(0.0, 0.0, 0.0, 0.0)
