"""How far a result in low precision is from the one in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hmpx.insight.tensors import Tensor

_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
_EXPONENT = 0x7F800000  # the bits of an FP32 number that hold its exponent


@dataclass
class Difference:
    """Sums over elements, of which the measures are made.

    Attributes:
        error, exact: sums of squares, of the differences and of the FP32 results. total: the sum of the differences.
        elements: how many. ulp: the largest difference, in units in the last place of the low dtype. nonfinite:
            elements that are not finite where FP32 is.
    """

    error: float = 0.0
    exact: float = 0.0
    total: float = 0.0
    elements: int = 0
    ulp: float = 0.0
    nonfinite: int = 0

    def add(self, low: Tensor, exact: Tensor, unit: torch.dtype | None = None) -> Tensor:
        """Add one result, and return the difference in FP32, with zeros where it is not finite.

        unit: the dtype in whose units in the last place the largest difference is noted; None: it is not.
        """
        low, exact = low.detach().float(), exact.detach().float()
        delta = low - exact
        error, whole = _square(delta), _square(exact)
        if not math.isfinite(error) or not math.isfinite(whole):
            self.nonfinite += int((~torch.isfinite(low) & torch.isfinite(exact)).sum())
            delta = delta.where(torch.isfinite(delta), 0.0)
            exact = exact.where(torch.isfinite(exact), 0.0)
            error, whole = _square(delta.double()), _square(exact.double())
        self.error += error
        self.exact += whole
        self.elements += delta.numel()
        if unit in _MANTISSA and delta.numel():
            power = (exact.contiguous().view(torch.int32) & _EXPONENT).view(torch.float32)
            power = power.clamp_min(torch.finfo(unit).smallest_normal)
            self.ulp = max(self.ulp, float((delta.abs() / power).max()) * 2 ** _MANTISSA[unit])
        self.total += float(delta.sum())
        return delta

    def merge(self, other: Difference) -> None:
        """Add what another holds."""
        for key in ("error", "exact", "total", "elements", "nonfinite"):
            setattr(self, key, getattr(self, key) + getattr(other, key))
        self.ulp = max(self.ulp, other.ulp)

    @property
    def relative(self) -> float:
        """The relative L2 error of what is finite."""
        return math.sqrt(self.error / self.exact) if self.exact else math.inf if self.error else 0.0

    @property
    def bias(self) -> float:
        """The mean difference, in units of the root mean square of the FP32 result."""
        rms = math.sqrt(self.exact / self.elements) if self.elements else 0.0
        return self.total / self.elements / rms if rms else 0.0

    @property
    def spread(self) -> float:
        """The standard deviation of the differences, in the same units."""
        return math.sqrt(max(self.relative**2 - self.bias**2, 0.0))


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2
