"""Averages of BF16 weights: torch's `AveragedModel` takes them in FP32 and writes them back by stochastic rounding.

It does so where an optimizer of the averaged model is attached, or a recipe is in force. With a decay of .999 an
average moves by a thousandth of the way in each update, which is less than half a unit in the last place of BF16:
rounded to nearest, it would stay where it began. The random numbers go by the name of the parameter and the number of
the update, so they are the same on every rank, and a shard has those of its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from hmpx.base import process_state
from hmpx.base.changes import Attribute, Changes
from hmpx.updates import gradients
from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.sharding import box_of, local

Tensors = Sequence[torch.Tensor]


def watch(changes: Changes) -> None:
    """Let `AveragedModel` average in FP32, until `changes` are undone."""
    attribute = Attribute(AveragedModel, "update_parameters", "torch.optim.swa_utils.AveragedModel.update_parameters")
    changes.put(attribute, _averaging_in_fp32(AveragedModel.update_parameters))


def _averaging_in_fp32(update: Callable) -> Callable:
    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        is_bf16 = any(p.dtype is torch.bfloat16 for _, p in state)
        if not is_bf16 or not (gradients.is_claimed(model.parameters()) or _is_under_recipe()):
            return update(self, model)
        names = {local(p.detach()).data_ptr(): name for name, p in state}
        own = self.multi_avg_fn
        by_tensor = own is None or getattr(own, "__code__", None) in _BY_TENSOR
        self.multi_avg_fn = functools.partial(_average, names, own or _one_by_one(self.avg_fn), by_tensor)
        try:
            update(self, model)
        finally:
            self.multi_avg_fn = own

    return update_parameters


def _is_under_recipe() -> bool:
    return any(hasattr(handle, "recipe") for handle in process_state.installed.values())


def _one_by_one(function: Callable | None) -> Callable:
    """Turn a function that averages two tensors into one of lists; None means torch's own."""
    if function is None:
        return swa_utils.get_swa_multi_avg_fn()

    def average(averages: Tensors, weights: Tensors, count: Any) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.copy_(function(average, weight, count))

    return average


# Functions of torch, which average each tensor by itself: one at a time bounds the memory
_BY_TENSOR = {swa_utils.get_ema_multi_avg_fn().__code__, swa_utils.get_swa_multi_avg_fn().__code__}


@torch.no_grad()
def _average(
    names: dict[int, str], function: Callable, by_tensor: bool, averages: Tensors, weights: Tensors, count: Any
) -> None:
    """Call an averaging function for BF16 tensors in FP32: for all at once, or for one after the other.

    Whose function it is says `by_tensor`: a user's may look across tensors, or count its calls.
    """
    if averages[0].dtype is not torch.bfloat16:  # torch calls for each dtype
        function(averages, weights, count)
        return
    key = RoundingKey(0, int(count))
    size = 1 if by_tensor else len(averages)
    for i in range(0, len(averages), size):
        some = averages[i : i + size]
        wide = [average.float() for average in some]
        function(wide, [weight.float() for weight in weights[i : i + size]], count)
        for average, x in zip(some, wide, strict=True):
            name = f"average of {names.get(local(average).data_ptr(), '')}"
            key.round_into(local(average), local(x), name, box_of(average, name))
        key.flush()
