"""Optimizer state of one parameter that is stepped in slices."""

from __future__ import annotations

from typing import Any

import torch

from hmpx.updates.optimizer_state import as_fp32, held_dtype
from hmpx.updates.ranks.sharding import local
from hmpx.updates.segment import Segment
from hmpx.updates.step_call import WriteBack

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class SlicedState:
    """The state of one parameter through the steps of its slices.

    A slice sees a view of each tensor that has the parameter's shape. It sees everything else, such as a count of
    steps, as it was before the first slice; what the last slice leaves of that is kept.
    """

    def __init__(self, states: dict, param: Parameter, write_back: WriteBack) -> None:
        self._states, self._param, self._write_back = states, param, write_back
        self._before = states.get(param)
        self._after: dict[str, Any] = dict(self._before or {})

    def tensors(self) -> list[Tensor]:
        """The tensors that slices see views of."""
        return [local(value) for value in self._after.values() if self._has_shape(value)]

    def _has_shape(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self._param.shape

    def show(self, segment: Segment, shadow: Tensor) -> None:
        """Give the shadow of a slice its part of the state."""
        if self._before is None:
            return
        shown = {}
        for key, value in self._before.items():
            if self._has_shape(value):
                value = self._part(segment, value)
            elif isinstance(value, Tensor):
                value = value.clone()
            shown[key] = value
        self._states[shadow] = shown

    def take_back(self, segment: Segment, shadow: Tensor) -> None:
        """Put what the step of a slice left into the parameter's state."""
        for key, value in self._states.pop(shadow, {}).items():
            if isinstance(value, Tensor) and value.shape == shadow.shape:
                if self._after.get(key) is None:
                    dtype = held_dtype(value, self._write_back.state_dtype)
                    self._after[key] = torch.empty_like(self._param, dtype=dtype, requires_grad=False)
                self._write(segment, key, value)
            else:
                self._after[key] = value

    def _part(self, segment: Segment, value: Tensor) -> Tensor:
        """A slice of a state tensor, in FP32; a view if it is that already, and flat in memory."""
        view = segment.flat_view(value)
        if view is None:
            view = torch.empty(segment.count, dtype=value.dtype, device=value.device)
            for block, part in segment.blocks(view):
                part.copy_(block.of(value))
        return as_fp32(view)

    def _write(self, segment: Segment, key: str, value: Tensor) -> None:
        whole = self._after[key]
        view = segment.flat_view(whole)
        if view is not None and view.dtype is value.dtype and view.data_ptr() == value.data_ptr():
            return  # the step wrote to the state itself
        for block, part in segment.blocks(value):
            if whole.dtype is value.dtype:
                block.of(whole).copy_(part)
            else:
                name = f"{segment.name}.{key}"
                self._write_back.rounding_key.round_into(block.of(whole), part, name, block.at, block.box)

    def finish(self) -> None:
        """All slices are done."""
        if self._before is not None:
            self._before.update(self._after)
        elif self._after:
            self._states[self._param] = self._after
