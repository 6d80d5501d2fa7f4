"""One look that says whether a step finds everything as the last one left it, but for gradients and options.

A step asks each parameter, gradient and state tensor in several places: names, dtypes, overlaps, whether a kernel can
read it. For many tensors that takes longer than the step. So all that these looks have found is kept, and one look says
whether it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import optim

from hmpx.base.torch_private import has, private
from hmpx.rounding import native
from hmpx.rounding.native import PLAIN
from hmpx.updates.holding.stores import Stores
from hmpx.updates.ranks.sharding import is_sharded, local
from hmpx.updates.stepping.fused_formulas import is_scaled
from hmpx.updates.stepping.names import membership, names_in_groups, parameters

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
TensorGuards = private("torch._C._dynamo.guards.TensorGuards")
_GRAD = attrgetter("grad")
_LOCAL = "torch.distributed.tensor.DTensor()._local_tensor"
_PARTS = attrgetter("_local_tensor", "device_mesh", "placements")  # of a DTensor


class Gradients(NamedTuple):
    """The gradients of a step as this rank holds them, and where they are."""

    tensors: list[Tensor]
    addresses: list[int]


class Fingerprint:
    """An optimizer after a step: while `look` finds gradients, only they and options have changed.

    Args:
        params: those that were stepped; they still have their gradients.
        is_part: others are stepped, too, and are not looked at.
    """

    def __init__(self, optimizer: optim.Optimizer, params: list[Parameter], stores: Stores, *, is_part: bool) -> None:
        self._params, self._stores, self._is_part = params, stores, is_part
        self._all, self._names = params if is_part else parameters(optimizer), membership(optimizer)[1:]
        self._states, self._beside = optimizer.state, self._look_beside()
        self._keys_of_states, self._own = self._look_at_states()
        self._dicts = [state for state in map(optimizer.state.get, params) if state is not None]
        self._keys, self._values = list(chain(*self._dicts)), values_of(self._dicts)
        known = (*self._all, *self._values, *chain(*self._beside))
        tensors = list({id(each): each for each in known}.values())
        self._sharded = [each for each in tensors if is_sharded(each)]
        self._parts, self._of_grads = list(map(_PARTS, self._sharded)), [is_sharded(p.grad) for p in params]
        self._grad_types = [type(p.grad) for p in params]
        self._tensors = [each for each in tensors if not is_sharded(each)] + [part for part, _, _ in self._parts]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Counts of steps lie in one way alone, and masters are what they were where their memory is: they are hmpx's.
        counts = [value for value in self._values if not value.dim()]
        not_laid = set(map(id, (*counts, *chain(*self._beside))))
        self._laid = [each for each in self._tensors if id(each) not in not_laid]
        grads = [local(p.grad) for p in params if p.grad is not None]
        self._guards = TensorGuards(*self._laid, *grads, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def _look_beside(self) -> list[tuple[Tensor, ...]]:
        return self._stores.beside(self._params if self._is_part else None)

    def _look_at_states(self) -> tuple[list[Any], list[Any]]:
        """Return parameters and their states; to list all hashes no keys, which tensors do in Python."""
        if self._is_part:
            return [], list(map(self._states.get, self._params))
        return list(self._states), list(self._states.values())

    @staticmethod
    def can_be(optimizer: optim.Optimizer, params: Iterable[Parameter]) -> bool:
        """Whether `look` can see every change: plain tensors on a CPU or a GPU, or DTensors with such parts.

        Not after a step whose gradients a GradScaler has left scaled.
        """
        every = parameters(optimizer)
        if is_scaled(optimizer) or (any(map(is_sharded, every)) and not has(_LOCAL)):
            return False
        if not all(map(_is_parameter, every)):
            return False
        for p in params:
            grad = p.grad
            if grad is None or not _is_seen(grad) or grad.dtype not in native.KINDS:
                return False
            for value in (optimizer.state.get(p) or {}).values():
                if not isinstance(value, Tensor) or not value.numel() or not _is_seen(value):
                    return False
        return True

    def look(self, optimizer: optim.Optimizer) -> Gradients | None:
        """Return the gradients of the next step, if it is of the same parameters and tensors; else None.

        One call of torch's C++ says that all tensors have the class, dtype, device, shape and strides that they had.
        """
        if optimizer.state is not self._states or is_scaled(optimizer):
            return None
        now = self._params if self._is_part else parameters(optimizer)
        keys, own = self._look_at_states()
        looks = (now, self._all), (keys, self._keys_of_states), (own, self._own), (self._look_beside(), self._beside)
        if not all([_are(*each) for each in looks]) or names_in_groups(optimizer) != self._names:
            return None
        values = chain.from_iterable(map(dict.values, self._dicts))
        if list(chain(*self._dicts)) != self._keys or not all(map(is_, values, self._values)):
            return None
        grads = self._gradients()
        if grads is None or not self._guards.check(*self._laid, *grads):
            return None
        if list(map(Tensor.data_ptr, self._tensors)) != self._addresses:
            return None
        addresses = list(map(Tensor.data_ptr, grads))
        if not all(addresses) and not all([at or not grad.numel() for at, grad in zip(addresses, grads, strict=True)]):
            return None  # the memory is not there
        if len(now) != len(grads) and sum([p.grad is not None for p in now]) != len(grads):
            return None
        return Gradients(grads, addresses)

    def _gradients(self) -> list[Any] | None:
        """Return this rank's part of each gradient; None where another tensor is sharded, or in another way."""
        grads: list[Any] = list(map(_GRAD, self._params))
        if not self._sharded:
            return grads  # the guards refuse one of another class, and None
        if list(map(type, grads)) != self._grad_types:
            return None
        if not all([_are(*each) for each in zip(map(_PARTS, self._sharded), self._parts, strict=True)]):
            return None
        for i, (grad, p) in enumerate(zip(grads, self._params, strict=True)):
            if self._of_grads[i]:
                grads[i], mesh, placements = _PARTS(grad)
                if (mesh, placements) != _PARTS(p)[1:]:
                    return None
        return grads


def _is_seen(tensor: Tensor) -> bool:
    tensor = _PARTS(tensor)[0] if is_sharded(tensor) else tensor
    return type(tensor) is Tensor and tensor.layout is torch.strided and (tensor.data_ptr() != 0 or not tensor.numel())


def _is_parameter(p: Parameter) -> bool:
    held = _PARTS(p)[0] if is_sharded(p) else p
    return type(held) in PLAIN and (held.is_cpu or held.is_cuda)


def _are(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether these are the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def values_of(states: Iterable[dict[str, Any]]) -> list[Any]:
    """Return all values of these dicts."""
    return list(chain.from_iterable(map(dict.values, states)))
