"""What a script does beside a step, where hmpx takes its steps: clipping, unscaling, averages of weights.

**Clipping.** torch takes the norm of each BF16 gradient in BF16: three digits, and others for another cutting over
ranks, so that clipped weights would depend on the number of ranks. Here squares are exact and added in FP64. Their
order moves the sum by some 1e-16, which the rounding to FP32 hides. FP32 gradients, whose last digit depends on the
cutting too, are treated alike. Scaling by the norm is torch's.

**Unscaling.** A script that was written for FP16 keeps its GradScaler under a recipe of BF16 weights. torch unscales
BF16 gradients on a CPU, and has no kernel for it on a GPU: there they are divided in FP32, and rounded to BF16 again.

**Averages of BF16 weights.** torch's `AveragedModel` takes them in FP32 and writes them back by stochastic rounding,
where an optimizer of the averaged model is attached, or a recipe is in force. With a decay of .999 an average moves by
a thousandth of the way in each update, which is less than half a unit in the last place of BF16: rounded to nearest, it
would stay where it began. The random numbers go by the name of the parameter and the number of the update, so they are
the same on every rank, and a shard has those of its part.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

from hmpx.base import process_state
from hmpx.base.changes import Attribute, Cell, Changes
from hmpx.base.tensors import is_on_host
from hmpx.base.torch_private import CLIPPING, UNSCALING, copy_all, norms_of, powers_of, private
from hmpx.updates.gradients import are_of_claimed, settings_of
from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.sharding import box_of, is_sharded, local
from hmpx.updates.stepping.names import plain_names

_SLICE = 1 << 20  # elements whose squares are in FP64 at once
_DTYPES = (torch.bfloat16, torch.float32)  # of gradients whose norm is taken here
_UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
_WIDENED_AT_ONCE = 1 << 26  # elements of gradients that are copied to FP32


def watch(changes: Changes) -> None:
    """Clip, unscale and average as the head of this file says, until `changes` are undone."""
    attribute = Attribute(AveragedModel, "update_parameters", "torch.optim.swa_utils.AveragedModel.update_parameters")
    changes.put(attribute, _averaging_in_fp32(AveragedModel.update_parameters))
    if UNSCALING.is_on():
        changes.put(Attribute(torch, _UNSCALE, f"torch.{_UNSCALE}"), _widening(private(f"torch.{_UNSCALE}")))
    if not CLIPPING.is_on():
        return
    wrapper = private("torch.nn.utils.clip_grad._get_total_norm")  # it holds the original in its closure
    cell = wrapper.__closure__[wrapper.__code__.co_freevars.index("func")]
    changes.put(Cell(cell, "torch.nn.utils._get_total_norm"), _exact(cell.cell_contents))


def _exact(function: Callable) -> Callable:
    @functools.wraps(function)
    def exact(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if float(norm_type) != 2:
            return function(tensors, norm_type, error_if_nonfinite, foreach)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not are_of_claimed(tensors):
            return function(tensors, norm_type, error_if_nonfinite, foreach)
        if not all(map(_is_known, tensors)) or len({t.device_mesh if is_sharded(t) else None for t in tensors}) != 1:
            return function(tensors, norm_type, error_if_nonfinite, foreach)
        # torch's own check of the result, and of `foreach`: the largest of one number is this number.
        norm = function([_norm(tensors)], math.inf, error_if_nonfinite, foreach)
        first = tensors[0]
        if not is_sharded(first):
            return norm
        from torch.distributed.tensor import Replicate

        everywhere = [Replicate()] * first.device_mesh.ndim
        return type(first).from_local(norm, first.device_mesh, everywhere, run_check=False)

    return exact


def _is_known(gradient: Any) -> bool:
    """Return whether the norm of a gradient can be taken in FP64: Apple's GPUs have none."""
    known = isinstance(gradient, Tensor) and gradient.dtype in _DTYPES and gradient.layout is torch.strided
    is_partial = known and is_sharded(gradient) and any(placement.is_partial() for placement in gradient.placements)
    return known and not is_partial and gradient.device.type != "mps"


def _norm(gradients: list[Tensor]) -> Tensor:
    """Return the norm over all ranks, in FP32."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if is_sharded(gradient) else None
        groups.setdefault(key, []).append(local(gradient))
    sums: dict[Any, Tensor] = {}  # by how the ranks share a gradient
    device = local(gradients[0]).device
    for key, some in groups.items():
        sums[key] = torch.stack([square.to(device) for square in _squares(some)]).sum()
    for key, square in sums.items():
        for dimension, placement in enumerate(key[1] if key else ()):
            if not placement.is_replicate():
                dist.all_reduce(square, group=key[0].get_group(dimension))
    return torch.stack(list(sums.values())).sum().sqrt().float()


def _squares(gradients: list[Tensor]) -> Iterable[Tensor]:
    """Return sums of squares, in FP64."""
    if all(map(is_on_host, gradients)):  # in the cache, which takes a third of the time of torch's norm
        return [part.double().square_().sum() for each in gradients for part in each.flatten().split(_SLICE)]
    return powers_of(norms_of(gradients, 2, dtype=torch.float64), 2)


def _widening(unscale: Callable) -> Callable:
    @functools.wraps(unscale)
    def unscaled(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
        try:
            unscale(grads, found_inf, inv_scale)
        except NotImplementedError:
            if any(grad.dtype is not torch.bfloat16 for grad in grads):
                raise
            for few in _small_lists(grads):
                wide = [grad.float() for grad in few]
                unscale(wide, found_inf, inv_scale)
                copy_all(few, wide)

    return unscaled


def _small_lists(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the gradients in their order, so many at a time that their copies are small."""
    few: list[Tensor] = []
    for grad in grads:
        if few and sum(each.numel() for each in few) + grad.numel() > _WIDENED_AT_ONCE:
            yield few
            few = []
        few.append(grad)
    yield few


def _averaging_in_fp32(update: Callable) -> Callable:
    @functools.wraps(update)
    def update_parameters(self: AveragedModel, model: torch.nn.Module) -> None:
        state = [*self.module.named_parameters(), *self.module.named_buffers()]
        is_bf16 = any(p.dtype is torch.bfloat16 for _, p in state)
        if not is_bf16 or not (settings_of(model.parameters()) or _is_under_recipe()):
            return update(self, model)
        plain = plain_names([name for name, _ in state])
        names = {local(p.detach()).data_ptr(): name for name, (_, p) in zip(plain, state, strict=True)}
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

    def average(averages: Sequence[Tensor], weights: Sequence[Tensor], count: Any) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.copy_(function(average, weight, count))

    return average


# Functions of torch, which average each tensor by itself: one at a time bounds the memory
_BY_TENSOR = {swa_utils.get_ema_multi_avg_fn().__code__, swa_utils.get_swa_multi_avg_fn().__code__}


@torch.no_grad()
def _average(
    names: dict[int, str],
    function: Callable,
    by_tensor: bool,
    averages: Sequence[Tensor],
    weights: Sequence[Tensor],
    count: Any,
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
