"""`Choice`: what was decided about a list name, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """What `tune` decided about a list name, everywhere or in one module, and why.

    Attributes:
        name: the list name. dtype: "bfloat16" or "float32". module: where that holds; "" where no other choice of this
            name does.
        gradient_error: what this alone in BF16 changes in the gradients, measured on one batch, in units of the noise
            between batches. loss_change: in the loss; loss_error: that in units of the noise between losses.
        budget: the share of the tolerance that this takes, as a square; above 1 it does not fit by itself.
        gain: what BF16 saves here; negative where BF16 costs more. unit: of that, by the objective: seconds of a step
            ("s"), "FLOP", bytes ("B").
        calls: in one batch.
        worst: the site whose results BF16 rounds most, as "module, file:line".
        why: what decided, in words.

        reason: all of that as a comment of a list.

    Example:
        >>> measured = {"gradient_error": 0.04, "loss_change": 3.1e-5, "budget": 0.16, "gain": 2e-4, "unit": "s"}
        >>> print(hmpx.Choice("softmax", "float32", **measured))
        softmax: float32  # loss 3.1e-05, gradients 4.0e-02, 16 % of the budget, BF16 saves 0.2 ms
    """

    name: str
    dtype: str
    module: str = ""
    gradient_error: float = 0.0
    loss_change: float = 0.0
    loss_error: float = 0.0
    budget: float = 0.0
    gain: float = 0.0
    unit: str = ""
    calls: int = 0
    worst: str = ""
    why: str = ""

    @property
    def reason(self) -> str:
        """As a comment of a list."""
        loss = f" ({self.loss_error:.1e} of the noise between losses)" if self.loss_error > self.gradient_error else ""
        said = [f"loss {self.loss_change:.1e}{loss}", f"gradients {self.gradient_error:.1e}"]
        said.append(f"{percent(self.budget)} of the budget" if self.budget < 2 else _times(self.budget))
        if self.gain:
            said.append(f"BF16 {'costs' if self.gain < 0 else 'saves'} {amount(abs(self.gain), self.unit)}")
        worst = f"worst: {self.worst}" if self.worst else ""
        return "; ".join(filter(None, (", ".join(said), self.why, worst)))

    def __str__(self) -> str:
        place = f" in {self.module}" if self.module else ""
        return f"{self.name}{place}: {self.dtype}  # {self.reason}"


def percent(share: float) -> str:
    """A share with two digits."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1g} %" if share else "0 %"


def _times(budget: float) -> str:
    return f"{budget:.0f} times the budget" if budget < 1e4 else "far beyond the budget"


def amount(value: float, unit: str) -> str:
    """Seconds in ms, FLOPs and bytes with a prefix."""
    if unit == "s":
        return f"{1e3 * value:.2g} ms"
    for prefix in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}"
