"""Optimizer state of one parameter that is stepped in slices."""

from __future__ import annotations

import torch

from hmpx.updates.held_state import HELD, HeldTensor, entries, held
from hmpx.updates.ranks.sharding import local
from hmpx.updates.segment import Segment
from hmpx.updates.state_forms import form_of
from hmpx.updates.step_call import WriteBack

Tensor = torch.Tensor


class SlicedState:
    """The state of one parameter through the steps of its slices.

    A slice sees its part of each tensor that has the parameter's shape. It sees everything else, such as a count of
    steps, as it was before the first slice; what the last slice leaves of that is kept.
    """

    def __init__(self, states: dict, segment: Segment, write_back: WriteBack) -> None:
        param = segment.param
        self._states, self._param, self._write_back = states, param, write_back
        self._form = form_of(segment)
        self._state = states.get(param)
        self._before = held(self._state or {}, param)
        self._after = dict(self._before)

    def tensors(self) -> list[Tensor]:
        """The tensors that slices see views of."""
        return [local(each.tensor) for each in self._before.values() if isinstance(each, HeldTensor)]

    def show(self, segment: Segment, shadow: Tensor) -> None:
        """Give the shadow of a slice its part of the state."""
        if self._state is None:
            return
        shown = {}
        for key, value in self._before.items():
            if isinstance(value, HELD):
                value = value.part(segment)
            elif isinstance(value, Tensor):
                value = value.clone()
            shown[key] = value
        self._states[shadow] = shown

    def take_back(self, segment: Segment, shadow: Tensor) -> None:
        """Put what the step of a slice left into the parameter's state."""
        for key, value in self._states.pop(shadow, {}).items():
            if isinstance(value, Tensor) and value.shape == shadow.shape:
                holder = self._form.holder(self._param, value, self._after.get(key))
                holder.write(segment, value, f"{segment.name}.{key}", self._write_back.rounding_key)
                self._after[key] = holder
            else:
                self._after[key] = value

    def finish(self) -> None:
        """All slices are done."""
        if self._state is not None:
            self._state.clear()
            self._state.update(entries(self._after))
        elif self._after:
            self._states[self._param] = entries(self._after)
