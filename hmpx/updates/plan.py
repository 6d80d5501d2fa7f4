"""What a step has seen of an optimizer's parameters, so that the next one need not look at all of it again.

A step looks at each parameter, gradient and state tensor in several places: names, dtypes, overlaps, what a kernel can
read. For small parameters that takes longer than the step. A plan holds what those looks have found, with what is made
of it, and one look says whether all of it is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import cast

import torch
from torch import optim

from hmpx.rounding import native
from hmpx.updates.fused_formulas import is_scaled
from hmpx.updates.names import fingerprint, parameters
from hmpx.updates.ranks.sharding import PLAIN
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.weights import StepStore

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Plan:
    """The next step of an optimizer, if that is one of the same parameters.

    Args:
        params: some of those that have gradients.
        store: of the weights.

    Attributes:
        params: these parameters.
        names: of those that are BF16.
    """

    names: list[str]

    def __init__(self, optimizer: optim.Optimizer, params: list[Parameter], store: StepStore) -> None:
        self._store, self._held = store, store.all_held()
        self._states, self._fingerprint = optimizer.state, fingerprint(optimizer)
        self._params, self.params = params, frozenset(params)
        self._shapes = [p.shape for p in params]
        self._dtypes = [cast(Tensor, p.grad).dtype for p in params]
        self._own = [optimizer.state.get(p) for p in params]
        self._values = [value for state in self._own if state for value in state.values()]
        self._ids, self._keys = list(map(id, self._values)), [key for state in self._own if state for key in state]
        has_places = all(isinstance(value, Tensor) and value.numel() for value in self._values)
        self._places = _places(self._values) if has_places else None  # what has no elements may change unseen

    def fits(self, optimizer: optim.Optimizer) -> bool:
        """Whether the next step of these parameters is that of the plan: only gradients and options have changed.

        It looks at all parameters in one respect after the other, which is a third faster than one after the other.
        """
        held = self._store.all_held()
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return False
        if optimizer.state is not self._states or is_scaled(optimizer) or fingerprint(optimizer) != self._fingerprint:
            return False
        grads = [grad for p in self._params if (grad := p.grad) is not None]
        if len(grads) != len(self._params) or [grad.shape for grad in grads] != self._shapes:
            return False
        if not {type(grad) for grad in grads} <= _PLAIN or not {grad.layout for grad in grads} <= {torch.strided}:
            return False
        if [grad.dtype for grad in grads] != self._dtypes or not set(self._dtypes) <= native.KINDS.keys():
            return False
        if not all([grad.is_cpu for grad in grads]) or not all([grad.is_contiguous() for grad in grads]):
            return False
        if any([grad.is_neg() for grad in grads]) or not all([grad.data_ptr() or not grad.numel() for grad in grads]):
            return False
        states = self._states
        if not all(map(is_, [states.get(p) for p in self._params], self._own)):
            return False
        if [id(value) for state in self._own if state for value in state.values()] != self._ids:
            return False
        if [key for state in self._own if state for key in state] != self._keys:
            return False
        if self._places is None or _places(self._values) != self._places:
            return False
        return all(map(Tensor.is_contiguous, self._values))

    def others(self, optimizer: optim.Optimizer) -> list[Parameter]:
        """The parameters with a gradient that are not of the plan."""
        params = parameters(optimizer)
        if len(params) == len(self._params):
            return []
        return [p for p in params if p.grad is not None and p not in self.params]

    def prepare(self, call: StepCall, write_back: WriteBack) -> Callable[[], None]:
        """What takes the step. Nothing changes before it is called; under `torch.no_grad()`."""
        raise NotImplementedError


_PLAIN = set(PLAIN)


def _places(tensors: list[Tensor]) -> tuple[list, list, list]:
    """Where each lies, how many elements it has, and what these are."""
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors)), [each.dtype for each in tensors]
