"""The step that torch.distributed.checkpoint takes to make an optimizer create its state.

torch gives each parameter a gradient of zeros in the parameter's dtype, which one that accumulates in FP32 refuses.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType

import torch

from hmpx import awaited
from hmpx.changes import Attribute, Changes
from hmpx.updates.stepping.names import parameters

_MODULE = "torch.distributed.checkpoint.state_dict"


class TrialSteps:
    """A part: lets such steps give BF16 gradients to parameters whose gradients are FP32."""

    def apply(self, changes: Changes) -> None:
        self._changes = changes
        changes.callback(awaited.stop_waiting, self)
        if _MODULE in sys.modules:
            self.take(sys.modules[_MODULE])
        else:
            awaited.await_module(_MODULE, self)

    def take(self, module: ModuleType) -> None:
        """Patch the module, which may just have been imported."""
        place = Attribute(module, "_init_optim_state", f"{_MODULE}._init_optim_state")
        self._changes.put(place, _taking_any_gradient(module._init_optim_state))


def _taking_any_gradient(init: Callable) -> Callable:
    @functools.wraps(init)
    def init_optim_state(optim: torch.optim.Optimizer) -> None:
        found = [p for p in parameters(optim) if p.grad is None and p.dtype is torch.bfloat16]
        wide = [p for p in found if getattr(p, "grad_dtype", None) is torch.float32]
        for p in wide:
            p.grad_dtype = None
        try:
            init(optim)
        finally:
            for p in wide:
                p.grad = None
                p.grad_dtype = torch.float32

    return init_optim_state
