"""Measures how far a low-precision result is from the FP32 result."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hmpx.insight.tensors import Tensor

# torch's own functions: through wrappers, which are there later, they take as long as the sums over a small tensor.
_float, _double, _sub, _subtract = Tensor.float, Tensor.double, torch.sub, Tensor.sub_
_norm, _dot, _reshape = torch.linalg.vector_norm, torch.dot, Tensor.reshape


@dataclass
class Distance:
    """Sums over elements, of which a relative error is made.

    Attributes:
        error, exact: sums of squares, of the differences and of the FP32 results. nonfinite: elements that are not
            finite where FP32 is.
    """

    error: float = 0.0
    exact: float = 0.0
    nonfinite: int = 0

    def add(self, low: Tensor, exact: Tensor, whole: float | None = None) -> Tensor:
        """Add one result, and return the difference in FP32, with zeros where it is not finite.

        whole: `square(exact)`, where it is known.
        """
        low, exact = low.detach(), in_full(exact)
        delta = _sub(low, exact) if low.dtype is torch.float32 else _subtract(_float(low), exact)
        error, whole = square(delta), square(exact) if whole is None else whole
        if not math.isfinite(error) or not math.isfinite(whole):
            self.nonfinite += int((~torch.isfinite(low) & torch.isfinite(exact)).sum())
            delta = delta.where(torch.isfinite(delta), 0.0)
            exact = exact.where(torch.isfinite(exact), 0.0)
            error, whole = square(_double(delta)), square(_double(exact))
        self.error += error
        self.exact += whole
        return delta

    def merge(self, other: Distance) -> None:
        """Add what another holds."""
        self.error, self.exact = self.error + other.error, self.exact + other.exact
        self.nonfinite += other.nonfinite

    @property
    def relative(self) -> float:
        """The relative L2 error of what is finite."""
        return math.sqrt(self.error / self.exact) if self.exact else math.inf if self.error else 0.0


def in_full(values: Tensor) -> Tensor:
    """A tensor in FP32, detached."""
    values = values.detach()
    return values if values.dtype is torch.float32 else _float(values)


def square(values: Tensor) -> float:
    """The sum of the squares."""
    return float(_norm(values)) ** 2


def product(a: Tensor, b: Tensor) -> float:
    """The sum of the products."""
    return float(_dot(_reshape(in_full(a), (-1,)), _reshape(in_full(b), (-1,))))
