"""The facts that a step's batches depend on, so that the next step can tell whether they changed.

A step looks at each parameter, gradient and state tensor in several places: names, dtypes, overlaps, what a kernel can
read. For small parameters that takes longer than the step. The fingerprint holds what those looks have found, and one
look says whether all of it is as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import optim
from torch._C._dynamo.guards import TensorGuards

from hmpx.rounding import native
from hmpx.updates.stepping.fused_formulas import is_scaled
from hmpx.updates.stepping.names import fingerprint, members, parameters

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Fingerprint:
    """An optimizer after a step: while `holds`, only gradients and options have changed.

    Args:
        params: those that were stepped, which have their gradients still.
        beside: what is kept beside weights.
    """

    def __init__(self, optimizer: optim.Optimizer, params: list[Parameter], beside: list[Tensor]) -> None:
        self._beside, self._states, self._members = beside, optimizer.state, members(optimizer)
        self._params = params
        self._own = [optimizer.state.get(p) for p in params]
        self._dicts = [state for state in self._own if state is not None]
        self._keys, self._values = list(chain(*self._dicts)), _values(self._dicts)
        different: dict[int, Tensor] = {id(each): each for each in (*parameters(optimizer), *self._values, *beside)}
        self._tensors = list(different.values())
        self._places = list(map(Tensor.data_ptr, self._tensors))
        looks = *self._tensors, *(p.grad for p in params)
        self._guards = TensorGuards(*looks, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    @staticmethod
    def can_be(optimizer: optim.Optimizer, params: Iterable[Parameter]) -> bool:
        """Whether `holds` can see every change: plain tensors on a CPU or a GPU, each with its own memory.

        Not after a step whose gradients a GradScaler has left scaled.
        """
        if is_scaled(optimizer) or fingerprint(optimizer) is None:
            return False
        for p in params:
            grad = p.grad
            if grad is None or not (p.is_cpu or p.is_cuda) or not _is_seen(grad) or grad.dtype not in native.KINDS:
                return False
            for value in (optimizer.state.get(p) or {}).values():
                if not isinstance(value, Tensor) or not value.numel() or not _is_seen(value):
                    return False
        return True

    def holds(self, optimizer: optim.Optimizer, beside: list[Tensor]) -> bool:
        """Whether the next step is of the same parameters and tensors.

        One call of torch's C++ says that all tensors have the class, dtype, device, shape and strides that they had.
        """
        if not _are(beside, self._beside) or optimizer.state is not self._states or is_scaled(optimizer):
            return False
        if members(optimizer) != self._members or not _are(list(map(self._states.get, self._params)), self._own):
            return False
        if list(chain(*self._dicts)) != self._keys or not _are(_values(self._dicts), self._values):
            return False
        grads: list[Any] = [p.grad for p in self._params]
        if not self._guards.check(*self._tensors, *grads):  # None is not what a gradient was, either
            return False
        if list(map(Tensor.data_ptr, self._tensors)) != self._places:
            return False
        if not all([grad.data_ptr() or not grad.numel() for grad in grads]):  # the memory is there
            return False
        params = parameters(optimizer)
        return len(params) == len(grads) or sum([p.grad is not None for p in params]) == len(grads)


def _is_seen(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided and (tensor.data_ptr() != 0 or not tensor.numel())


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def _values(states: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))
