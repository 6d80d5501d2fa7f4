"""The scale that decides: errors of gradients, in units of the noise between batches.

**The problem.** A relative error says little about training: a gradient differs from batch to batch anyway. An error
that is small beside that noise does nothing; a bias that is not averaged away does.

**The units.** With g_b the FP32 gradient of batch b of N, and g their mean, the noise is sqrt(mean |g_b - g|^2). The
error of a set of lists is sqrt(mean |e_b|^2) / noise, with e_b what they change in g_b; the bias is |mean e_b| over
noise / sqrt(N), by which the mean of N batches is off anyway.

**Site by site** that would take a run for each. Instead the weights are shifted by h v, with v random numbers of unit
variance, and the first-order change of the loss by the error of a site is taken at both places: the difference over h
is v . e_b of this site alone, whose square is |e_b|^2 in the mean over v. One more run gives it for all sites; it is
right within a factor of two or so, and knows nothing of what the backward pass rounds. What looks broken is measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hmpx.insight.tensors import Tensor

DIRECTIONS = 2  # of v, taken in turn by the batches
_ALIKE = 1e-10  # relative variance of gradients that is no more than rounding
SHIFT = 1e-3  # of the root mean square of the weights: far above what FP32 rounds, far below what bends the loss


class Noise:
    """The gradients of all batches, as far as the units need them."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._sum: list[Tensor] = []
        self._errors = 0.0
        self._error_sum: list[Tensor] = []
        self._wrong: list[bool] = []
        self.batches = 0

    def add(self, exact: Sequence[Tensor], low: Sequence[Tensor]) -> float:
        """The gradients of one batch, in FP32 and under the lists. Returns the squared norm of their difference."""
        errors = [b - a for a, b in zip(exact, low, strict=True)]
        if not self._sum:
            self._sum, self._error_sum = [torch.zeros_like(g) for g in exact], [torch.zeros_like(g) for g in exact]
        for totals, values in ((self._sum, exact), (self._error_sum, errors)):
            for total, value in zip(totals, values, strict=True):
                total.add_(value)
        whole, error = square(exact), square(errors)
        self._squares += whole
        self._errors += error
        self._wrong.append(math.isfinite(whole) and not math.isfinite(error))
        self.batches += 1
        return error

    def is_wrong(self, batch: int) -> bool:
        """Whether the gradient of a batch is finite in FP32, and not under the lists."""
        return self._wrong[batch]

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
        """The root of a mean square, in units of the noise."""
        return math.sqrt(squares) / self.noise

    @property
    def error(self) -> float:
        """Of the lists as a whole."""
        return self.in_noise(self._errors / max(self.batches, 1))

    @property
    def bias(self) -> float:
        """Of the lists as a whole."""
        return self.in_noise(square(self._error_sum) / self.batches)  # |mean|^2 N


def square(gradients: Sequence[Tensor]) -> float:
    """The squared norm of all of them; infinite where one is not finite."""
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).double()
    total = float(norms.square().sum())
    return total if math.isfinite(total) else math.inf


def shifts(parameters: Sequence[Tensor], h: float, directions: int = DIRECTIONS, seed: int = 0) -> list[list[Tensor]]:
    """h v for each direction v: random numbers of unit variance, of the shape of each parameter."""
    found = []
    for direction in range(directions):
        generator = torch.Generator().manual_seed(seed + direction)
        found.append([torch.randn(p.shape, generator=generator).mul_(h).to(p.device) for p in parameters])
    return found


def step_size(parameters: Sequence[Tensor], shift: float = SHIFT) -> float:
    """h: how far the weights are shifted along a direction, for a shift of their root mean square."""
    elements = sum(p.numel() for p in parameters)
    return shift * (math.sqrt(square([p.detach().float() for p in parameters]) / elements) or 1.0)


def mean_square(projected: Sequence[float]) -> float:
    """Of v . e_b: an estimate of the mean of |e_b|^2."""
    return sum(p * p for p in projected) / len(projected) if projected else math.nan
