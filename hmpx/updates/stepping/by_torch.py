"""Steps by a formula in torch's operators, with the bits of the kernels, so that a step depends on no device or layout.

They step FP32 copies of a few parameters at a time. If these lie in one piece, a kernel can step the copies.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from hmpx.rounding import eager, native, table
from hmpx.rounding.devices import is_lazy, kernels_for
from hmpx.rounding.native import StoredTensor
from hmpx.updates.holding.held import Held, HeldTensor, RoundingKey, Segment, held_states, laid_as
from hmpx.updates.holding.sharding import local
from hmpx.updates.holding.stores import Stores
from hmpx.updates.stepping.optimizer_classes import Formula
from hmpx.updates.stepping.step_call import StepContext
from hmpx.updates.stepping.transfers import together

logger = logging.getLogger("hmpx")
Tensor = torch.Tensor


@dataclass(eq=False, slots=True)
class Taken:
    """One parameter of a batch. The gradient is not in it, so that its memory can be freed.

    Attributes:
        index: the index of the gradient in the list of all gradients.
        group: the index of the group, and not its dict, which a user may replace.
        keys: the keys of the state tensors, in the kernel's order.
        known: the state by the optimizer's own keys, with the new entries.
        new: the entries that the step will put into the optimizer's state.
    """

    segment: Segment
    index: int
    group: int
    keys: tuple[str | None, ...]
    known: Mapping[str, Any]
    new: dict[str, Any]


class TorchBackend:
    """Steps parameters by torch's operators, from FP32 copies of some of them at a time."""

    def __init__(self, taken: list[Taken], formula: Formula, context: StepContext) -> None:
        device = taken[0].segment.param.device
        self._kernel, self._stores, self._states = formula.kernel, context.stores, context.optimizer.state
        numbered = together(list(enumerate(taken)), context.size(device), lambda each: each[1].segment.share)
        self._few = list(numbered)

    def scale(self, scalars: list[tuple[float, ...]]) -> None:
        """Remember the scalars of all parameters."""
        self._scalars = scalars

    def run(self, gradients: Sequence[Tensor], key: RoundingKey) -> None:
        """Read, step and write some parameters at a time."""
        for few in self._few:
            copies = [_Copies(each, self._stores, self._states, gradients, self._scalars[i]) for i, each in few]
            step_copies(self._kernel, [each.arguments for each in copies])
            for each in copies:
                each.write(key)
            key.flush()


class _Copies:
    """FP32 tensors of one parameter, which lie alike: those that are held so themselves, copies of the others."""

    def __init__(
        self,
        taken: Taken,
        stores: Stores,
        states: Mapping[Any, Any],
        gradients: Sequence[Tensor],
        scalars: tuple[float, ...],
    ) -> None:
        self._segment, self._read = taken.segment, list[tuple[Held, str, Tensor]]()
        store, name, p = stores.of(taken.segment), taken.segment.name, taken.segment.param
        store.begin()
        state = held_states({**(states.get(p) or {}), **taken.new}, p)
        weight = self._copy(store, name)
        own = [None if key is None else self._copy(state[key], f"{name}.{key}") for key in taken.keys]
        grad = gradients[taken.index]
        grad = grad if grad.dtype is torch.float32 and _lie_alike(grad, weight) else laid_as(grad, weight, weight.dtype)
        strides = weight.stride()
        order = sorted(range(weight.dim()), key=lambda dim: -strides[dim])  # of memory, for the kernels

        def stored(x: Tensor) -> StoredTensor:
            return StoredTensor.of(x.permute(order))

        of_states = tuple([None if x is None else stored(x) for x in own])
        self.arguments = native.StepArguments(stored(weight), stored(grad), of_states, scalars)

    def _copy(self, held: Held, name: str) -> Tensor:
        p, tensor = local(self._segment.param), local(held.tensor)
        is_wide = isinstance(held, HeldTensor) and tensor.dtype is torch.float32
        if is_wide and _lie_alike(tensor, torch.empty_like(p, device="meta")):
            return tensor
        x = torch.empty_like(p, dtype=torch.float32, requires_grad=False)
        held.read(self._segment, x)
        self._read.append((held, name, x))
        return x

    def write(self, key: RoundingKey) -> None:
        """Write the copies back."""
        for held, name, x in self._read:
            held.write(self._segment, x, name, key)
        self._segment.mark_written()


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.stride() == other.stride() or (one.is_contiguous() and other.is_contiguous())


def step_copies(kernel: str, stepped: list[native.StepArguments]) -> None:
    """Step FP32 tensors of one device, by a kernel if there is one."""
    tensors = [each.tensor for one in stepped for each in one.tensors() if each is not None]
    modules = {kernels_for(each) if each.numel() < 2**32 else None for each in tensors}
    module = modules.pop() if len(modules) == 1 else None
    if module is not None:
        table.step_list(module, kernel, stepped, 0)
        torch.autograd.graph.increment_version(tensors)
        return
    if not (tensors[0].is_cpu or is_lazy(tensors[0])):
        _warn_of_slow_steps(tensors[0].device.type)
    for _, alike in groupby(stepped, lambda one: ([each is None for each in one.states], one.scalars)):
        few = list(alike)
        weights, grads = [one.weight.tensor for one in few], [one.grad.tensor for one in few]
        columns = zip(*(one.states for one in few), strict=True)
        states = [None if column[0] is None else [each.tensor for each in column if each] for column in columns]
        eager.step_list(kernel, weights, grads, states, [one.scalars for one in few])


@functools.cache
def _warn_of_slow_steps(device: str) -> None:
    """Warn, once for each kind of device that has no kernels; `native` warns of a CPU without them."""
    logger.warning(
        "hmpx: there is no kernel for steps on %s (Triton is not installed, or does not know the device): torch's "
        "operators take them, with the same bits, and go through memory about 20 times where a kernel does so once; "
        "attach(optimizer, fused=False) asks for the optimizer's own step, with its bits",
        device,
    )
