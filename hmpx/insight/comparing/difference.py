"""How far a result in low precision is from the one in FP32."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from hmpx.insight.tensors import Tensor

_MANTISSA = {torch.bfloat16: 7, torch.float16: 10}
_EXPONENT = 0x7F800000  # the bits of an FP32 number that hold its exponent
# torch's own functions: through wrappers, which are there later, they take as long as the sums over a small tensor.
_float, _double, _sub, _subtract, _sum = Tensor.float, Tensor.double, torch.sub, Tensor.sub_, Tensor.sum
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
        """Add what another of the same kind holds."""
        for key, value in vars(other).items():
            mine = getattr(self, key)
            setattr(self, key, max(mine, value) if key == "ulp" else mine + value)

    @property
    def relative(self) -> float:
        """The relative L2 error of what is finite."""
        return math.sqrt(self.error / self.exact) if self.exact else math.inf if self.error else 0.0


@dataclass
class Difference(Distance):
    """The same, with what tells a bias from a spread, and the largest difference.

    Attributes:
        total: the sum of the differences. elements: how many. ulp: the largest, in units in the last place of the low
            dtype.
    """

    total: float = 0.0
    elements: int = 0
    ulp: float = 0.0

    def add(self, low: Tensor, exact: Tensor, whole: float | None = None) -> Tensor:
        delta = super().add(low, exact, whole)
        self.elements += delta.numel()
        self.total += float(_sum(delta))
        return delta

    def note_largest(self, delta: Tensor, exact: Tensor, unit: torch.dtype | None) -> None:
        """Note the largest of the differences that `add` has returned, in units in the last place of `unit`."""
        if unit in _MANTISSA and delta.numel():
            power = (in_full(exact).contiguous().view(torch.int32) & _EXPONENT).view(torch.float32)
            power = power.clamp_min(torch.finfo(unit).smallest_normal)
            self.ulp = max(self.ulp, float((delta.abs() / power).max()) * 2 ** _MANTISSA[unit])

    @property
    def bias(self) -> float:
        """The mean difference, in units of the root mean square of the FP32 result."""
        rms = math.sqrt(self.exact / self.elements) if self.elements else 0.0
        return self.total / self.elements / rms if rms else 0.0

    @property
    def spread(self) -> float:
        """The standard deviation of the differences, in the same units."""
        return math.sqrt(max(self.relative**2 - self.bias**2, 0.0))


def in_full(values: Tensor) -> Tensor:
    """In FP32, and without what autograd knows of it."""
    values = values.detach()
    return values if values.dtype is torch.float32 else _float(values)


def square(values: Tensor) -> float:
    """The sum of the squares."""
    return float(_norm(values)) ** 2


def product(a: Tensor, b: Tensor) -> float:
    """The sum of the products."""
    return float(_dot(_reshape(in_full(a), (-1,)), _reshape(in_full(b), (-1,))))
