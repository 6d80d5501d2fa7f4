"""What does not run: errors that a program raises because something in it is in BF16, and FP32 that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hmpx.errors import HmpxError
from hmpx.insight.comparing.noise import square


def said(error: Exception) -> str:
    """What such an error says, in one line. That memory ran out is no matter of lists, and is raised again."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        raise error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def check_finite(loss: float, gradients: Sequence[torch.Tensor], what: str) -> None:
    """Check what FP32 gives for a batch: all else is compared with it."""
    if not math.isfinite(loss):
        raise HmpxError(f"tune: the loss of {what} is {loss} in FP32 already, so there is nothing to compare BF16 with")
    if gradients and not math.isfinite(square(gradients)):
        raise HmpxError(f"tune: the gradients of {what} are not finite in FP32 already; its loss is {loss:g}")
