"""`Choice`: what was decided about a list name, and why. `Mark`: lists as a point of a plot."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """What `tune` decided about a list name, everywhere or in one module, and why.

    Attributes:
        name: the list name. dtype: "bfloat16" or "float32"; of a choice of FP8 "float8" or "bfloat16". module: where
            that holds; "" where no other choice of this name does.
        gradient_error: what this alone in BF16 changes in the gradients, measured on one batch, in units of the noise
            between batches. loss_change: in the loss; loss_error: that in units of the noise between losses. NaN where
            it was not run alone, as everything that saves something holds together.
        gain: what BF16 saves here; negative where BF16 costs more. unit: of that, by the objective: seconds of a step
            ("s"), "FLOP", bytes ("B").
        calls: in one batch. where: the first line that calls it, as "module, file:line", and how many more there are.
        why: what decided, in words. low: what is chosen beside that, "BF16" or "FP8".

        reason: all of that as a comment of a list.

    Example:
        >>> measured = {"gradient_error": 0.04, "loss_change": 3.1e-5, "gain": 2e-4, "unit": "s"}
        >>> print(hmpx.Choice("softmax", "float32", why="fits", **measured))
        softmax: float32  # fits; alone: gradient error 0.04, loss change 3.1e-05; BF16 saves 0.2 ms
    """

    name: str
    dtype: str
    module: str = ""
    gradient_error: float = math.nan
    loss_change: float = math.nan
    loss_error: float = math.nan
    gain: float = 0.0
    unit: str = ""
    calls: int = 0
    where: str = ""
    why: str = ""
    low: str = "BF16"

    @property
    def reason(self) -> str:
        """As a comment of a list."""
        said = [self.why]
        if not math.isnan(self.gradient_error):
            loss = f" ({self.loss_error:.2g} of the noise)" if self.loss_error > self.gradient_error else ""
            said.append(f"alone: gradient error {self.gradient_error:.2g}, loss change {self.loss_change:.2g}{loss}")
        if self.gain:
            said.append(f"{self.low} {'adds' if self.gain < 0 else 'saves'} {amount(abs(self.gain), self.unit)}")
        return "; ".join(filter(None, [*said, self.where and f"at {self.where}"]))

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        return f"{self.name}{place}: {self.dtype}  # {self.reason}"


@dataclass(frozen=True)
class Mark:
    """Lists as a point of a plot.

    Attributes:
        name: of the lists. cost: in the unit of the objective. gradient_error: on held-out batches, in units of the
            noise between batches. share: of the FLOPs of matrix products, what is in BF16. raised: what the program
            raises under these lists; its error is infinite then, and its cost that of the ops that they name.

    Example:
        >>> hmpx.Mark("all in FP32", cost=1.9e-3, gradient_error=0.0, share=0.0).name
        'all in FP32'
    """

    name: str
    cost: float
    gradient_error: float
    share: float
    raised: str = ""


def percent(share: float) -> str:
    """A share with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %" if share else "0 %"


def amount(value: float, unit: str) -> str:
    """Seconds in ms, FLOPs and bytes with a prefix."""
    if value < 0:
        return f"-{amount(-value, unit)}"
    if unit == "s":
        return f"{1e3 * value:.2g} ms"
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}"
