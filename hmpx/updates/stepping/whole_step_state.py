"""Moves the optimizer state of whole parameters to their FP32 shadows for the length of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hmpx.updates.holding.memory_order import laid_as
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.state_dtypes import as_fp32, is_bf16, is_moment, keeps_bf16
from hmpx.updates.holding.state_forms import form_of, written
from hmpx.updates.holding.state_tensors import HeldState, held, is_coded
from hmpx.updates.ranks.sharding import PLAIN, is_sharded, local
from hmpx.updates.stepping.step_call import WriteBack
from hmpx.updates.stepping.write_counts import raises_versions

Tensor = torch.Tensor


class ShadowState:
    """The state of one whole parameter, under the key of its shadow from `show` until `finish` or `undo`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segment: Segment,
        shadow: Tensor,
        write_back: WriteBack,
        one_layout: bool,
    ) -> None:
        self._optimizer, self._segment, self._shadow, self._write_back = optimizer, segment, shadow, write_back
        self._form = form_of(segment)
        self._states, self._one_layout = optimizer.state, one_layout
        self._before = self._states.get(segment.param)
        self._kept = {k: list(v) if isinstance(v, list) else v for k, v in _items(self._before)}
        self._versions = [(t, t._version) for _, value in _items(self._before) for t in _tensors(value)]

    def show(self) -> None:
        """Give the state to the shadow. If that raises, for want of memory, `undo` finds it where it was."""
        if self._before is not None:
            shown = self._shown(self._before)
            self._states.pop(self._segment.param)
            self._states[self._shadow] = shown

    def _shown(self, before: Any) -> Any:
        """The value that the step sees; the same object if nothing has to be copied."""
        if not isinstance(before, dict):
            return before
        form, like = self._form, self._shadow if self._one_layout else None
        if form.as_left and not is_coded(before) and (like is None or _are_contiguous(like, *before.values())):
            return before
        seen = held(before, self._segment.param) if is_coded(before) else before
        shown = {key: value.whole() if isinstance(value, HeldState) else value for key, value in seen.items()}
        if not form.as_left:
            shown = {key: as_fp32(value) for key, value in shown.items()}
        for key, value in shown.items():
            if like is None:
                break
            if is_moment(value) and value.shape == like.shape and local(value).stride() != local(like).stride():
                shown[key] = laid_as(value, like, value.dtype)
        return before if seen is before and all(shown[k] is v for k, v in before.items()) else shown

    def finish(self) -> None:
        """Give the state that the step left to the parameter."""
        left = self._states.pop(self._shadow, None)
        if left is None:
            return
        if isinstance(left, dict) and not self._is_as_left:
            before = held(self._before or {}, self._segment.param)
            form, rounding_key = self._form, self._write_back.rounding_key
            after: dict[str, Any] = {}
            for key, value in left.items():
                after.update(written(form, self._segment, key, value, before.get(key), rounding_key))
            left.clear()
            left.update(after)
        elif self._before is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
            keeps_bf16(self._optimizer)
        self._states[self._segment.param] = left

    @property
    def _is_as_left(self) -> bool:
        """Whether the parameter keeps state in the form that the step leaves."""
        return self._form.as_left

    def undo(self) -> str | None:
        """Give the parameter its old state again after the step raised.

        Returns:
            The parameter's name if the step has written to that state in place, which cannot be undone.
        """
        self._states.pop(self._shadow, None)
        if self._before is None:
            return None
        if isinstance(self._before, dict):
            self._before.clear()
            self._before.update(self._kept)
        self._states[self._segment.param] = self._before
        is_blind = not raises_versions(self._optimizer)
        is_written = any(is_blind or tensor._version != version for tensor, version in self._versions)
        return self._segment.name if is_written else None


class GatheredShadowState(ShadowState):
    """The state of a sharded parameter for a step that sees it whole; this rank keeps its part of the result.

    State of another shape than the parameter, such as factored moments, is whole on every rank, and the same.
    """

    def _shown(self, before: Any) -> Any:
        return {key: _gathered(value) for key, value in held(before, self._segment.param).items()}

    @property
    def _is_as_left(self) -> bool:
        return False


def _are_contiguous(*values: Any) -> bool:
    """Whether all tensors among these are plain and contiguous, and so have one layout."""
    for value in values:  # a loop, as every step asks this of every small parameter
        if isinstance(value, Tensor) and not (type(value) in PLAIN and value.is_contiguous()):
            return False
    return True


def _items(state: Any) -> Iterable[tuple[str, Any]]:
    return state.items() if isinstance(state, dict) else ()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list) else []


def _gathered(value: Any) -> Any:
    """A copy of a state value in FP32, whole."""
    value = value.whole() if isinstance(value, HeldState) else value
    if not isinstance(value, Tensor):
        return value
    return as_fp32(value.full_tensor() if is_sharded(value) else value.clone())
