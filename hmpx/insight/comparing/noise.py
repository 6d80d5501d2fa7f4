"""How large an error is: of a result, relative to it; of gradients, in units of the noise between batches.

**The problem.** A relative error says little about training: a gradient differs from batch to batch anyway. An error
that is small beside that noise does nothing; a bias that is not averaged away does.

**The units.** With g_b the FP32 gradient of batch b of N, and g their mean, the noise is sqrt(mean |g_b - g|^2). The
error of a set of lists is sqrt(mean |e_b|^2) / noise, with e_b the change of g_b by the lists; the bias is |mean e_b|
over noise / sqrt(N), the distance by which the mean of N batches is off anyway.

**Site by site** that would take a run for each. Instead the weights are shifted by h v, with v random numbers of unit
variance, and the first-order change of the loss by the error of a site is taken at both places. The difference over h
is v . e_b of this site alone; the mean of its square over v is |e_b|^2. One more run gives it for all sites. It is
right within a factor of two or so, and knows nothing of rounding in the backward pass. What looks broken is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hmpx.insight.tensors import Tensor

DIRECTIONS = 2  # of v, taken in turn by the batches
_ALIKE = 1e-10  # relative variance of gradients that is no more than rounding
_SHIFT = 1e-3  # of the root mean square of the weights: far above what FP32 rounds, far below what bends the loss

# torch's own functions: through wrappers, which are there later, they take as long as the sums over a small tensor.
_float, _double, _sub, _subtract = Tensor.float, Tensor.double, torch.sub, Tensor.sub_
_norm, _dot, _reshape = torch.linalg.vector_norm, torch.dot, Tensor.reshape


@dataclass
class Distance:
    """Sums over elements, from which a relative error is computed.

    Attributes:
        error, exact: sums of squares, of the differences and of the FP32 results. nonfinite: the number of elements
            that are finite in FP32 only.
    """

    error: float = 0.0
    exact: float = 0.0
    nonfinite: int = 0

    def add(self, low: Tensor, exact: Tensor, whole: float | None = None) -> Tensor:
        """Add one result, and return the difference in FP32, with zeros where it is not finite.

        whole: `square_of(exact)`, where it is known.
        """
        low, exact = low.detach(), in_full(exact)
        delta = _sub(low, exact) if low.dtype is torch.float32 else _subtract(_float(low), exact)
        error, whole = square_of(delta), square_of(exact) if whole is None else whole
        if not math.isfinite(error) or not math.isfinite(whole):
            self.nonfinite += int((~torch.isfinite(low) & torch.isfinite(exact)).sum())
            delta = delta.where(torch.isfinite(delta), 0.0)
            exact = exact.where(torch.isfinite(exact), 0.0)
            error, whole = square_of(_double(delta)), square_of(_double(exact))
        self.error += error
        self.exact += whole
        return delta

    def merge(self, other: Distance) -> None:
        """Add the sums of another."""
        self.error, self.exact = self.error + other.error, self.exact + other.exact
        self.nonfinite += other.nonfinite

    @property
    def relative(self) -> float:
        """The relative L2 error of the finite elements."""
        return math.sqrt(self.error / self.exact) if self.exact else math.inf if self.error else 0.0


def in_full(values: Tensor) -> Tensor:
    """Return a tensor in FP32, detached."""
    values = values.detach()
    return values if values.dtype is torch.float32 else _float(values)


def square_of(values: Tensor) -> float:
    """Return the sum of the squares."""
    return float(_norm(values)) ** 2


def product(a: Tensor, b: Tensor) -> float:
    """Return the sum of the products."""
    return float(_dot(_reshape(in_full(a), (-1,)), _reshape(in_full(b), (-1,))))


class Noise:
    """Sums over the gradients of all batches, in FP32 and under the lists."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._sum: list[Tensor] = []
        self._errors = 0.0
        self._error_sum: list[Tensor] = []
        self.batches = 0

    def add(self, exact: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        """Add the gradients of one batch, in FP32 and under the lists; return the squared norm of their difference."""
        errors = [b - a for a, b in zip(exact, low, strict=True)]
        if not self._sum:
            self._sum, self._error_sum = [torch.zeros_like(g) for g in exact], [torch.zeros_like(g) for g in exact]
        for totals, values in ((self._sum, exact), (self._error_sum, errors)):
            for total, value in zip(totals, values, strict=True):
                total.add_(value)
        error = square(errors)
        self._squares += square(exact)
        self._errors += error
        self.batches += 1
        return error

    @property
    def noise(self) -> float:
        """The root mean square of the distance of a batch's gradient from the mean; NaN for batches that are alike."""
        if self.batches < 2:
            return math.nan
        whole, mean = self._squares / self.batches, square(self._sum) / self.batches**2
        if whole - mean <= _ALIKE * mean:
            return math.nan
        return math.sqrt((whole - mean) * self.batches / (self.batches - 1))

    def in_noise(self, squares: float) -> float:
        """Return the root of a mean square, in units of the noise."""
        return math.sqrt(squares) / self.noise

    @property
    def error(self) -> float:
        """The gradient error of the lists as a whole."""
        return self.in_noise(self._errors / max(self.batches, 1))

    @property
    def bias(self) -> float:
        """The bias of the lists as a whole."""
        return self.in_noise(square(self._error_sum) / self.batches)  # |mean|^2 N


def square(gradients: Sequence[Tensor]) -> float:
    """Return the squared norm of all gradients; infinite where one is not finite."""
    norms = torch.stack([torch.linalg.vector_norm(gradient).double() for gradient in gradients])
    total = float(norms.square().sum())
    return total if math.isfinite(total) else math.inf


def shifts(parameters: Sequence[Tensor], h: float) -> list[list[Tensor]]:
    """Return h v for each direction v: random numbers of unit variance, of the shape of each parameter.

    A complex parameter has two for each element.
    """
    found = []
    for direction in range(DIRECTIONS):
        generator = torch.Generator().manual_seed(direction)
        found.append([_random(p, generator).mul_(h).to(p.device) for p in parameters])
    return found


def _random(p: Tensor, generator: torch.Generator) -> Tensor:
    if p.is_complex():
        return torch.view_as_complex(torch.randn((*p.shape, 2), generator=generator))
    return torch.randn(p.shape, generator=generator)


def step_size(parameters: Sequence[Tensor]) -> float:
    """Return h, the length of a shift along one direction for each weight."""
    elements = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
    wide = [p.detach() if p.is_complex() else p.detach().float() for p in parameters]
    return _SHIFT * (math.sqrt(square(wide) / elements) or 1.0)


def mean_square(values: Sequence[float]) -> float:
    """Return the mean of the squares; of v . e_b, an estimate of the mean of |e_b|^2."""
    return sum(value * value for value in values) / len(values) if values else math.nan
