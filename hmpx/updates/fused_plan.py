"""A fused step of all parameters, remembered from one step to the next."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import optim

from hmpx.rounding import native
from hmpx.updates.fused_formulas import Formula
from hmpx.updates.held_state import by_own_keys
from hmpx.updates.plan import Plan
from hmpx.updates.segment import Segment
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.weights import StepStore

Tensor = torch.Tensor


class _Planned(NamedTuple):
    """What a kernel is told of one parameter."""

    group: int  # its place in `param_groups`, where somebody may put another dict
    keys: tuple[str | None, ...]  # of its state tensors, in the kernel's order
    known: Mapping[str, Any]  # the state, by the optimizer's own keys


class FusedPlan(Plan):
    """What C kernels have taken of the step of an optimizer.

    Args:
        taken: the parameters, each with its group; their state is there.
        stepped: what the kernels were given.
        store: of the weights.

    Attributes:
        names: of these parameters.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        formula: Formula,
        taken: list[tuple[dict, Segment]],
        stepped: list[native.Stepped],
        store: StepStore,
    ) -> None:
        super().__init__(optimizer, [segment.param for _, segment in taken], store)
        self._formula = formula
        self.names = [segment.name for _, segment in taken]
        places = {id(group): place for place, group in enumerate(optimizer.param_groups)}
        self._planned = [
            _Planned(places[id(group)], formula.states(group), by_own_keys(optimizer.state[segment.param]))
            for group, segment in taken
        ]
        self._counts = [each.known["step"] for each in self._planned] if formula.counts else []
        self._words = native.words_of(stepped)

    @staticmethod
    def can_be(optimizer: optim.Optimizer, formula: Formula, taken: list[tuple[dict, Segment]]) -> bool:
        """Whether this can be remembered: all these parameters are on the CPU, with tensors alone in their state."""
        return formula.tensors_alone and Plan.can_be_seen(optimizer, [segment.param for _, segment in taken])

    def fits(self, optimizer: optim.Optimizer) -> bool:
        """Whether the next step of these parameters is that of the plan, by the same kernels."""
        if not super().fits(optimizer):
            return False
        groups, last = optimizer.param_groups, -1
        for group, keys, known in self._planned:
            if group != last:
                last, options = group, groups[group]
                if not self._formula.takes(options, known) or self._formula.states(options) != keys:
                    return False
        return True

    def prepare(self, call: StepCall, write_back: WriteBack) -> Callable[[], None]:
        """What steps the parameters of the plan."""
        steps = [count.item() + 1.0 for count in self._counts] or [0.0] * len(self._planned)
        scalars, known = array("f"), {}
        for each, step in zip(self._planned, steps, strict=True):
            of = each.group, step, self._formula.depends_on(each.known)
            if of not in known:
                options = call.optimizer.param_groups[each.group]
                known[of] = native.scalars_of(self._formula.scalars(call.optimizer, options, step, of[2]))
            scalars.extend(known[of])
        step_key = write_back.rounding_key.of_step
        native.gradients_at(self._words, self._gradients)

        def run() -> None:
            native.step_words(self._formula.kernel, self._words, scalars, step_key)
            if self._counts:
                torch._foreach_add_(self._counts, 1)
            torch.autograd.graph.increment_version(list(self.params))

        return run
