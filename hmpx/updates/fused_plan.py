"""A fused step of all parameters, remembered from one step to the next.

A step looks at each parameter, gradient and state tensor in several places: names, dtypes, overlaps, what a kernel can
read. For small parameters that takes longer than the step. A plan holds what those looks have found, with what the
kernels are given, and one look says whether all of it is as it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import optim

from hmpx.rounding import native
from hmpx.updates.fused_formulas import Formula, is_scaled
from hmpx.updates.held_state import by_own_keys
from hmpx.updates.names import fingerprint, parameters
from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class _Planned(NamedTuple):
    """One parameter."""

    param: Parameter
    shape: torch.Size
    group: dict
    keys: tuple[str | None, ...]  # of its state tensors, in the kernel's order
    state: dict
    known: Mapping[str, Any]  # the state, by the optimizer's own keys
    held: list[tuple[str, Tensor, int, int]]  # in the state: key, tensor, address, how many elements follow one another


class FusedPlan:
    """What C kernels have taken of the step of an optimizer.

    Args:
        taken: the parameters, each with its group; their state is there.
        stepped: what the kernels were given.

    Attributes:
        params: these parameters.
        names: their names.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        formula: Formula,
        taken: list[tuple[dict, Segment]],
        stepped: list[native.Stepped],
    ) -> None:
        self._formula, self._states, self._fingerprint = formula, optimizer.state, fingerprint(optimizer)
        self.params = frozenset(segment.param for _, segment in taken)
        self.names = [segment.name for _, segment in taken]
        self._planned = []
        for group, segment in taken:
            state = optimizer.state[segment.param]
            held = [(key, value, value.data_ptr(), value.numel()) for key, value in state.items()]
            param, keys, known = segment.param, formula.states(group), by_own_keys(state)
            self._planned.append(_Planned(param, param.shape, group, keys, state, known, held))
        self._counts = [each.state["step"] for each in self._planned] if formula.counts else []
        self._weights = [each.param for each in self._planned]
        self._words = native.words_of(stepped)

    @staticmethod
    def can_be(optimizer: optim.Optimizer, formula: Formula, taken: list[tuple[dict, Segment]]) -> bool:
        """Whether this can be remembered: all these parameters are on the CPU, with tensors alone in their state."""
        return (
            formula.tensors_alone
            and fingerprint(optimizer) is not None
            and all(
                segment.param.is_cpu
                and all(isinstance(value, Tensor) for value in optimizer.state[segment.param].values())
                for _, segment in taken
            )
        )

    def fits(self, optimizer: optim.Optimizer) -> bool:
        """Whether the next step of these parameters is that of the plan: only gradients and options have changed."""
        if optimizer.state is not self._states or is_scaled(optimizer) or fingerprint(optimizer) != self._fingerprint:
            return False
        states, group = self._states, None
        for param, shape, own_group, keys, state, known, held in self._planned:
            if own_group is not group:
                group = own_group
                if not self._formula.takes(group, known) or self._formula.states(group) != keys:
                    return False
            grad = param.grad
            if grad is None or not native.is_plain(grad) or not grad.is_cpu or grad.shape != shape:
                return False
            if grad.dtype not in native.KINDS or states.get(param) is not state or len(state) != len(held):
                return False
            for key, value, pointer, count in held:
                if state.get(key) is not value or value.data_ptr() != pointer:
                    return False
                if value.numel() != count or not value.is_contiguous():
                    return False
        return True

    def others(self, optimizer: optim.Optimizer) -> list[Parameter]:
        """The parameters with a gradient that are not of the plan."""
        params = parameters(optimizer)
        if len(params) == len(self._planned):
            return []
        return [p for p in params if p.grad is not None and p not in self.params]

    def run(self, optimizer: optim.Optimizer, rounding_key: RoundingKey) -> None:
        """Step the parameters of the plan."""
        steps = [count.item() + 1.0 for count in self._counts] or [0.0] * len(self._planned)
        scalars, known = array("f"), {}
        for each, step in zip(self._planned, steps, strict=True):
            of = id(each.group), step, self._formula.depends_on(each.known)
            if of not in known:
                known[of] = native.scalars_of(self._formula.scalars(optimizer, each.group, step, of[2]))
            scalars.extend(known[of])
        grads = [cast(Tensor, p.grad) for p in self._weights]
        native.step_words(self._formula.kernel, self._words, scalars, grads, rounding_key.of_step)
        if self._counts:
            torch._foreach_add_(self._counts, 1)
        torch.autograd.graph.increment_version(self._weights)
