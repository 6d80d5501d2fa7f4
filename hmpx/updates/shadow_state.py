"""Optimizer state of whole parameters, which belongs to their FP32 shadows for the length of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from hmpx.updates.layout import laid_as
from hmpx.updates.optimizer_state import as_fp32, held_dtype, is_bf16, is_moment, keeps_bf16
from hmpx.updates.ranks.sharding import box_of, held_part, is_sharded, local
from hmpx.updates.segment import Segment
from hmpx.updates.step_call import WriteBack

Tensor = torch.Tensor
BF16 = torch.bfloat16


class ShadowState:
    """The state of one whole parameter, under the key of its shadow until `finish` or `undo`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segment: Segment,
        shadow: Tensor,
        write_back: WriteBack,
        one_layout: bool,
    ) -> None:
        self._optimizer, self._segment, self._shadow, self._write_back = optimizer, segment, shadow, write_back
        self._states = states = optimizer.state
        self._before = states.pop(segment.param, None)
        if self._before is None:
            return
        self._kept = {k: list(v) if isinstance(v, list) else v for k, v in _items(self._before)}
        self._versions = [(tensor, tensor._version) for _, value in _items(self._before) for tensor in _tensors(value)]
        states[shadow] = self._shown(self._before, one_layout)

    def _shown(self, before: Any, one_layout: bool) -> Any:
        """What the step sees."""
        widen = self._write_back.state_dtype is not torch.float32
        return _for_shadow(before, widen, self._shadow if one_layout else None)

    def finish(self) -> None:
        """The step is done: give the state that it left to the parameter."""
        left = self._states.pop(self._shadow, None)
        if left is None:
            return
        if self._write_back.state_dtype is BF16 and isinstance(left, dict):
            before = self._before or {}
            held = {key: self._rounded(key, value, before.get(key)) for key, value in left.items()}
            left.clear()
            left.update(held)
        elif self._before is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
            keeps_bf16(self._optimizer)
        self._states[self._segment.param] = left

    def undo(self) -> str | None:
        """The step raised: give the parameter its old state again.

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
        is_written = any(tensor._version != version for tensor, version in self._versions)
        return self._segment.name if is_written else None

    def _rounded(self, key: str, value: Any, before: Any) -> Any:
        """A state value in BF16, in the tensor that held it before the step where there is one."""
        if not is_moment(value):
            return value
        reuse = is_moment(before) and before.dtype is BF16 and before.shape == value.shape
        out = before if reuse else torch.empty_like(value, dtype=BF16)
        name = f"{self._segment.name}.{key}"
        self._write_back.rounding_key.round_into(local(out), local(value), name, 0, box_of(value, name))
        return out


class GatheredShadowState(ShadowState):
    """The state of a sharded parameter, for a step that sees the whole of it; this rank keeps its part of the result.

    State of another shape than the parameter, such as factored moments, is whole on every rank, and the same.
    """

    def _shown(self, before: Any, one_layout: bool) -> Any:
        return {key: _gathered(value) for key, value in before.items()}

    def finish(self) -> None:
        left, segment, before = self._states.pop(self._shadow, None), self._segment, self._before or {}
        if left is None:
            return
        for key, value in left.items():
            if isinstance(value, Tensor) and value.dim() and value.shape == segment.param.shape:
                left[key] = self._held_part(key, value, before)
            elif self._write_back.state_dtype is BF16:
                left[key] = self._rounded(key, value, before.get(key))
        self._states[segment.param] = left

    def _held_part(self, key: str, whole: Tensor, before: dict[str, Any]) -> Tensor:
        """What this rank holds of a tensor of the parameter's shape, in the tensor that held it before the step."""
        segment, dtype = self._segment, held_dtype(whole, self._write_back.state_dtype)
        held = before[key] if key in before else torch.empty_like(segment.param, dtype=dtype, requires_grad=False)
        part = held_part(segment.param, whole)
        if dtype is whole.dtype:
            local(held).copy_(part)
        else:
            name = f"{segment.name}.{key}"
            self._write_back.rounding_key.round_into(local(held), part, name, 0, segment.box)
        return held


def _items(state: Any) -> Iterable[tuple[str, Any]]:
    return state.items() if isinstance(state, dict) else ()


def _tensors(value: Any) -> Iterator[Tensor]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Tensor):
            yield item


def _for_shadow(before: Any, widen: bool, like: Tensor | None) -> Any:
    """State as a step on a shadow sees it; the same object if nothing has to be copied.

    widen: BF16 tensors are cast to FP32. like: tensors of this one's shape get its layout.
    """
    if not isinstance(before, dict):
        return before
    shown = {k: as_fp32(v) if widen else v for k, v in before.items()}
    for key, value in shown.items():
        if like is None:
            break
        if is_moment(value) and value.shape == like.shape and local(value).stride() != local(like).stride():
            shown[key] = laid_as(value, like, value.dtype)
    return before if all(shown[k] is v for k, v in before.items()) else shown


def _gathered(value: Any) -> Any:
    """A copy of a state value in FP32, whole."""
    if not isinstance(value, Tensor):
        return value
    return as_fp32(value.full_tensor() if is_sharded(value) else value.clone())
