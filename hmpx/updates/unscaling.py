"""GradScaler beside BF16 gradients: torch unscales them on a CPU, and has no kernel for it on a GPU.

A script that was written for FP16 keeps its scaler under a recipe of BF16 weights. `unscale_` and `step` of the scaler
then divide gradients in FP32, and round them to BF16 again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from hmpx.base.changes import Attribute, Changes
from hmpx.base.torch_private import UNSCALING, copy_all, private

Tensor = torch.Tensor

_NAME = "_amp_foreach_non_finite_check_and_unscale_"
_MOST = 1 << 26  # elements that are copied to FP32 at a time


def watch(changes: Changes) -> None:
    """Unscale what torch cannot, until `changes` are undone."""
    if UNSCALING.is_on():
        changes.put(Attribute(torch, _NAME, f"torch.{_NAME}"), _widening(private(f"torch.{_NAME}")))


def _widening(unscale: Callable) -> Callable:
    @functools.wraps(unscale)
    def unscaled(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        try:
            unscale(grads, found_inf, inv_scale)
        except NotImplementedError:
            if any(grad.dtype is not torch.bfloat16 for grad in grads):
                raise
            for few in _few(grads):
                wide = [grad.float() for grad in few]
                unscale(wide, found_inf, inv_scale)
                copy_all(few, wide)

    return unscaled


def _few(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in their order, so many at a time that their copies are small."""
    few: list[Tensor] = []
    for grad in grads:
        if few and sum(each.numel() for each in few) + grad.numel() > _MOST:
            yield few
            few = []
        few.append(grad)
    yield few
