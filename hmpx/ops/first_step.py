"""What a conversion looks at when an optimizer first steps, and warns of once: FP16 without a `GradScaler`, which loses
gradients below 6e-8, and BF16 on a GPU that has no instructions for it (T4, V100), where torch computes it slowly.
"""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hmpx.changes import Changes

logger = logging.getLogger("hmpx")


class FirstStep:
    """A part of a conversion whose ops run in `low`; with the next conversion it looks again."""

    def __init__(self, low: torch.dtype) -> None:
        self._low, self._looked = low, False

    def apply(self, changes: Changes) -> None:
        changes.callback(register_optimizer_step_pre_hook(self._look).remove)

    def _look(self, *_: Any) -> None:
        if self._looked or torch.compiler.is_compiling():
            return
        self._looked = True
        if self._low is torch.float16 and not _has_scaler():
            logger.warning(
                "hmpx: ops run in FP16, and there is no enabled GradScaler: gradients below 6e-8 become 0. Write "
                "scaler = torch.amp.GradScaler(device), and scaler.scale(loss).backward(), scaler.step(optimizer), "
                "scaler.update() in each step"
            )
        if self._low is torch.bfloat16 and torch.cuda.is_initialized() and not torch.cuda.is_bf16_supported(False):
            logger.warning(
                "hmpx: ops run in BF16, and this GPU (%s) has no instructions for it, so that they are slow. The "
                "recipe apex-o1, or convert(low_precision=torch.float16), runs them in FP16; scale the loss then",
                torch.cuda.get_device_name(),
            )


def _has_scaler() -> bool:
    scalers = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.amp.GradScaler))
    return any(scaler.is_enabled() for scaler in scalers)
