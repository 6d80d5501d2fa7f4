"""Gradients that accumulate in FP32 under `fully_shard` (FSDP2), which adds up micro-batches in a dtype of its own.

Between two reductions FSDP2 keeps the sum of whole gradients: in ``MixedPrecisionPolicy(reduce_dtype=...)``, or else in
the dtype of the weights. A sum in BF16 cannot be made FP32 afterwards, so whoever asks for one is refused.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from hmpx.base.changes import Attribute, Changes
from hmpx.base.torch_private import FSDP_SUMS
from hmpx.errors import HmpxError

Parameter = torch.nn.Parameter

_ours: set[Parameter] = set()  # sharded ones whose gradients accumulate in FP32
_changes = Changes()  # of FSDPModule, while there are some
_PUT_OFF = "set_requires_gradient_sync", "set_requires_all_reduce"


def sum_in_fp32(p: Parameter, undo: contextlib.ExitStack) -> None:
    """Refuse sums of the gradient of `p` in BF16, until `undo`."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None and not _ours and FSDP_SUMS.is_on():
        for name in _PUT_OFF:
            method = getattr(module.FSDPModule, name)
            _changes.put(Attribute(module.FSDPModule, name, f"FSDPModule.{name}"), _checked(method))
    _ours.add(p)
    undo.callback(_leave, p)


def _leave(p: Parameter) -> None:
    _ours.discard(p)
    if not _ours:
        _changes.close()


def _checked(method: Callable) -> Callable:
    @functools.wraps(method)
    def checked(module: Any, required: bool, *, recurse: bool = True) -> None:
        for each in module.modules() if recurse and not required else [module] * (not required):
            if isinstance(each, sys.modules["torch.distributed.fsdp"].FSDPModule) and _sums_low(each):
                raise HmpxError(
                    f"{method.__name__}(False) lets FSDP2 add up the gradients of micro-batches in bfloat16, and this "
                    f"model is attached with use_fp32_grad_acc: shard it with fully_shard(..., mp_policy="
                    "MixedPrecisionPolicy(reduce_dtype=torch.float32)), or let each micro-batch be reduced"
                )
        method(module, required, recurse=recurse)

    return checked


def _sums_low(module: Any) -> bool:
    """Whether FSDP2 adds up gradients of ours in BF16, in this module without those inside it."""
    state = module._get_fsdp_state()
    one = [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) else []  # before torch 2.13
    for group in getattr(state, "_fsdp_param_groups", one):
        for each in group.fsdp_params:
            if each.sharded_param in _ours and each.mp_policy.reduce_dtype is not torch.float32:
                return True
    return False
