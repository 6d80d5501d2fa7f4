"""The unit of gradient errors: the noise between batches.

**The problem.** A relative error says little about training: a gradient differs from batch to batch anyway. An error
that is small beside that noise does nothing; a bias that is not averaged away does.

**The units.** With g_b the FP32 gradient of batch b of N, and g their mean, the noise is sqrt(sum |g_b - g|^2 / (N -
1)). The error of a choice of precisions is sqrt(mean |e_b|^2) / noise, with e_b the change of g_b.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hmpx.insight.tensors import Tensor

_ALIKE = 1e-10  # relative variance of gradients that is no more than rounding


def noise_of(gradients: Sequence[Sequence[Tensor]]) -> float:
    """Return the distance of a batch's gradient from the mean, root mean square; NaN for batches that are alike.

    gradients: for each batch, those of all parameters.
    """
    n = len(gradients)
    if n < 2 or not gradients[0]:
        return math.nan
    total = [torch.zeros_like(each) for each in gradients[0]]
    for batch in gradients:
        for each, gradient in zip(total, batch, strict=True):
            each.add_(gradient)
    whole, mean = sum(map(square, gradients)) / n, square(total) / n**2
    return math.sqrt((whole - mean) * n / (n - 1)) if whole - mean > _ALIKE * mean else math.nan


def square(gradients: Sequence[Tensor]) -> float:
    """Return the squared norm of all gradients; infinite where one is not finite."""
    if not gradients:
        return 0.0
    norms = torch.stack([torch.linalg.vector_norm(gradient).double() for gradient in gradients])
    total = float(norms.square().sum())
    return total if math.isfinite(total) else math.inf
