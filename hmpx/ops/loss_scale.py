"""FP16 loses gradients below 6e-8, so training in it without a `GradScaler` gives one warning for each conversion."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hmpx.changes import Changes

logger = logging.getLogger("hmpx")


class ScalerLookedFor:
    """A part of an FP16 conversion: looks for a scaler at the first optimizer step."""

    def __init__(self) -> None:
        self._looked = False

    def apply(self, changes: Changes) -> None:
        changes.callback(register_optimizer_step_pre_hook(self._look).remove)

    def _look(self, *_: Any) -> None:
        if self._looked or torch.compiler.is_compiling():
            return
        self._looked = True
        scalers = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.amp.GradScaler))
        if not any(scaler.is_enabled() for scaler in scalers):
            logger.warning(
                "hmpx: ops run in FP16, and there is no enabled GradScaler: gradients below 6e-8 become 0. Write "
                "scaler = torch.amp.GradScaler(device), and scaler.scale(loss).backward(), scaler.step(optimizer), "
                "scaler.update() in each step"
            )
