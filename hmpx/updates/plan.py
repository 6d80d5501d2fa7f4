"""What a step has seen of an optimizer's parameters, so that the next one need not look at all of it again.

A step looks at each parameter, gradient and state tensor in several places: names, dtypes, overlaps, what a kernel can
read. For small parameters that takes longer than the step. A plan holds what those looks have found, with what is made
of it, and one look says whether all of it is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import optim
from torch._C._dynamo.guards import TensorGuards

from hmpx.rounding import native
from hmpx.updates.fused_formulas import is_scaled
from hmpx.updates.names import fingerprint, members, parameters
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.weights import StepStore

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Plan:
    """The next step of an optimizer, if that is one of the same parameters.

    Args:
        params: some of those that have gradients, and that `can_be_seen` in a plan.
        store: of the weights.

    Attributes:
        params: these parameters, and their places in their order.
        names: of those that are BF16.
    """

    names: list[str]

    def __init__(self, optimizer: optim.Optimizer, params: list[Parameter], store: StepStore) -> None:
        self._store, self._held = store, store.all_held()
        self._states, self._members = optimizer.state, members(optimizer)
        self.params = {p: place for place, p in enumerate(params)}
        self._own = [optimizer.state.get(p) for p in params]
        self._dicts = [state for state in self._own if state is not None]
        self._keys, self._values = list(chain(*self._dicts)), _values(self._dicts)
        different: dict[int, Tensor] = {id(each): each for each in (*parameters(optimizer), *self._values)}
        self._tensors = list(different.values())
        self._places = list(map(Tensor.data_ptr, self._tensors))
        looks = *self._tensors, *(p.grad for p in params)
        self._gradients: list[int] = []  # where those of `params` are, as `fits` has seen
        self._guards = TensorGuards(*looks, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    @staticmethod
    def can_be_seen(optimizer: optim.Optimizer, params: Iterable[Parameter]) -> bool:
        """Whether all that `fits` looks at can be seen, and C kernels can read these gradients and this state.

        Not after a step whose gradients a GradScaler has left scaled.
        """
        if is_scaled(optimizer) or fingerprint(optimizer) is None:
            return False
        for p in params:
            grad = p.grad
            if grad is None or not native.can_read(grad) or grad.dtype not in native.KINDS:
                return False
            for value in (optimizer.state.get(p) or {}).values():
                if not isinstance(value, Tensor) or not value.numel() or not value.is_contiguous():
                    return False
        return True

    def fits(self, optimizer: optim.Optimizer) -> bool:
        """Whether the next step of these parameters is that of the plan: only gradients and options have changed.

        One call of torch's C++ says that all tensors have the class, dtype, device, shape and strides that they had.
        """
        held = self._store.all_held()
        if not _are(held, self._held) or optimizer.state is not self._states or is_scaled(optimizer):
            return False
        if members(optimizer) != self._members or not _are(list(map(self._states.get, self.params)), self._own):
            return False
        if list(chain(*self._dicts)) != self._keys or not _are(_values(self._dicts), self._values):
            return False
        grads: list[Any] = [p.grad for p in self.params]
        if not self._guards.check(*self._tensors, *grads):  # None is not what a gradient was, either
            return False
        if list(map(Tensor.data_ptr, self._tensors)) != self._places:
            return False
        self._gradients = list(map(Tensor.data_ptr, grads))
        return all(self._gradients) or all([grad.data_ptr() or not grad.numel() for grad in grads])  # memory is there

    def others(self, optimizer: optim.Optimizer) -> list[Parameter]:
        """The parameters with a gradient that are not of the plan."""
        params = parameters(optimizer)
        if len(params) == len(self.params):
            return []
        return [p for p in params if p.grad is not None and p not in self.params]

    def prepare(self, call: StepCall, write_back: WriteBack) -> Callable[[], None]:
        """What takes the step. Nothing changes before it is called; under `torch.no_grad()`."""
        raise NotImplementedError


def _are(now: list, before: list) -> bool:
    """Whether these are the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def _values(states: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, states)))
