"""Optimizer state between two steps and during one.

During a step the state of a BF16 parameter is FP32 and belongs to its shadow. Between steps it is held in FP32, or in
BF16 if `state_dtype` says so, rounded stochastically.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import optim

from hmpx.updates.layout import laid_as
from hmpx.updates.ranks.sharding import box_of, held_part, is_sharded, local
from hmpx.updates.weights import RoundingKey, Segment

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16 = torch.bfloat16

# State that a constructor fills with an option, in the parameter's dtype: BF16 would keep 0.1 as 0.10009765625.
_FILLED_BY = ((optim.Adagrad, "sum", "initial_accumulator_value"),)

_OF_TORCH = tuple(c for c in vars(optim).values() if isinstance(c, type) and c is not optim.Optimizer)

_keeping_bf16: weakref.WeakSet = weakref.WeakSet()  # optimizers whose own choice it is to keep some state in BF16


def cast_state(optimizer: optim.Optimizer, dtype: torch.dtype, *, lists: bool = True) -> bool:
    """Bring the state of BF16 parameters into the dtype it is held in; whether FP32 was asked for and BF16 found.

    `lists`: the tensors in lists too, as LBFGS has them for its history. BF16 is found in state of earlier plain steps,
    of a constructor, or of a load that cast it down: then all of a parameter's state is BF16.
    """
    found = False
    wrong = torch.float32 if dtype is BF16 else BF16
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p) if p.dtype is BF16 else None
            if not isinstance(state, dict):
                continue
            keys = [key for key, v in state.items() if _holds(v, wrong) and (lists or not isinstance(v, list))]
            if not keys or (dtype is torch.float32 and _is_own(optimizer, state)):
                continue
            for key in keys:
                found = found or dtype is torch.float32
                option = _filled_by(optimizer, key)
                if option is not None and state["step"] == 0:
                    state[key] = None  # gone before its successor comes, and made again if there is no room for that
                    try:
                        state[key] = torch.full_like(p, group[option], dtype=dtype, requires_grad=False)
                    finally:
                        if state[key] is None:
                            before = torch.empty_like(p, dtype=wrong, requires_grad=False)
                            state[key] = before.fill_(group[option])
                else:
                    state[key] = _cast(state[key], wrong, dtype)
    return found


def has_fp32_state(optimizer: optim.Optimizer) -> bool:
    """Whether BF16 parameters have FP32 state that torch's own step, which computes in one dtype, cannot go on with."""
    if not isinstance(optimizer, _OF_TORCH):  # another's may hold its state in FP32 whatever the parameters are
        return False
    params = [p for group in optimizer.param_groups for p in group["params"] if p.dtype is BF16]
    states = [state for state in map(optimizer.state.get, params) if isinstance(state, dict)]
    return any(_holds(value, torch.float32) for state in states for value in state.values())


def cast_state_of(optimizer: optim.Optimizer, p: Parameter, held: torch.dtype) -> None:
    """Bring BF16 state of a parameter that is not BF16 any more into the parameter's dtype.

    BF16 is found if it was `held` in that, or after plain steps and `detach`.
    """
    state = optimizer.state.get(p)
    if not isinstance(state, dict) or (held is torch.float32 and _is_own(optimizer, state)):
        return
    for key, value in state.items():
        state[key] = _cast(value, BF16, p.dtype)


def _filled_by(optimizer: optim.Optimizer, key: str) -> str | None:
    return next((option for cls, name, option in _FILLED_BY if name == key and isinstance(optimizer, cls)), None)


def _holds(value: Any, dtype: torch.dtype) -> bool:
    """Whether a state value, or an item of a list, is a tensor of `dtype`.

    A count of steps is FP32 without a dimension, and is not meant.
    """
    if isinstance(value, list):
        return any(_holds(item, dtype) for item in value)
    return _is_dense(value) and value.dtype is dtype and (value.dim() > 0 or dtype is BF16)


def _is_dense(value: Any) -> bool:
    """A tensor whose numbers are what they seem, sharded or not; another class may hold them in eight bits."""
    return type(value) is Tensor or is_sharded(value)


def _cast(value: Any, wrong: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(item, wrong, dtype) for item in value]
    return value.to(dtype) if _holds(value, wrong) else value


def _is_own(optimizer: optim.Optimizer, state: dict) -> bool:
    """Whether the optimizer keeps BF16 state of FP32 parameters by its own choice."""
    others = (v for v in state.values() if _is_dense(v) and v.dtype is torch.float32)
    return optimizer in _keeping_bf16 or any(v.dim() for v in others)


def _is_moment(value: Any) -> bool:
    """A tensor of moments or the like."""
    floating = _is_dense(value) and value.dtype in (BF16, torch.float32)
    return floating and value.dim() > 0 and value.layout is torch.strided


def _is_bf16(value: Any) -> bool:
    return _is_dense(value) and value.dtype is BF16


def _as_fp32(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_fp32(item) for item in value]
    return value.float() if _is_bf16(value) else value


def _rounded(value: Any, before: Any, segment: Segment, key: str, rounding_key: RoundingKey) -> Any:
    """A state value after a step, held in BF16, in the tensor that held it before where there is one."""
    if not _is_moment(value):
        return value
    reuse = _is_moment(before) and before.dtype is BF16 and before.shape == value.shape
    out = before if reuse else torch.empty_like(value, dtype=BF16)
    name = f"{segment.name}.{key}"
    rounding_key.round_into(local(out), local(value), name, 0, box_of(value, name))
    return out


class ShadowState:
    """The state of one whole parameter, with its shadow for the length of a step."""

    def __init__(
        self, optimizer: optim.Optimizer, segment: Segment, shadow: Tensor, dtype: torch.dtype, one_layout: bool
    ) -> None:
        self._optimizer, self._run, self._shadow, self._dtype = optimizer, segment, shadow, dtype
        self._states = states = optimizer.state
        self._before = states.pop(segment.param, None)
        if self._before is None:
            return
        self._kept = {k: list(v) if isinstance(v, list) else v for k, v in _items(self._before)}
        self._versions = [(tensor, tensor._version) for _, value in _items(self._before) for tensor in _tensors(value)]
        states[shadow] = _shown(self._before, dtype is not torch.float32, shadow if one_layout else None)

    def finish(self, rounding_key: RoundingKey) -> None:
        """The step is done: what it left belongs to the parameter."""
        made = self._states.pop(self._shadow, None)
        if made is None:
            return
        if self._dtype is BF16 and isinstance(made, dict):
            before = self._before or {}
            kept = {k: _rounded(v, before.get(k), self._run, k, rounding_key) for k, v in made.items()}
            made.clear()
            made.update(kept)
        elif self._before is None and isinstance(made, dict) and any(map(_is_bf16, made.values())):
            _keeping_bf16.add(self._optimizer)
        self._states[self._run.param] = made

    def undo(self) -> str | None:
        """The step raised: the parameter has its old state again. Its name, if the step has written to it in place."""
        self._states.pop(self._shadow, None)
        if self._before is None:
            return None
        if isinstance(self._before, dict):
            self._before.clear()
            self._before.update(self._kept)
        self._states[self._run.param] = self._before
        return self._run.name if any(tensor._version != version for tensor, version in self._versions) else None


def _items(state: Any) -> Iterable[tuple[str, Any]]:
    return state.items() if isinstance(state, dict) else ()


def _tensors(value: Any) -> Iterator[Tensor]:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Tensor):
            yield item


def _shown(before: Any, cast_state_of: bool, like: Tensor | None) -> Any:
    """State as a step on a shadow sees it, in the layout of that if it is given; what was held otherwise is a copy."""
    if not isinstance(before, dict):
        return before
    shown = {k: _as_fp32(v) if cast_state_of else v for k, v in before.items()}
    for key, value in shown.items() if like is not None else ():
        if _is_moment(value) and value.shape == like.shape and local(value).stride() != local(like).stride():
            shown[key] = laid_as(value, like, value.dtype)
    return before if all(shown[k] is v for k, v in before.items()) else shown


class GatheredShadowState(ShadowState):
    """That of a sharded parameter, for a step that sees the whole of it: only the part that this rank holds is kept.

    What has another shape than the parameter, such as factored moments, is whole on every rank, and the same.
    """

    def __init__(
        self, optimizer: optim.Optimizer, segment: Segment, shadow: Tensor, dtype: torch.dtype, one_layout: bool
    ) -> None:
        super().__init__(optimizer, segment, shadow, dtype, one_layout=False)  # the whole of a shard is contiguous
        if self._before is not None:
            self._states[shadow] = {key: _gathered(value) for key, value in self._before.items()}

    def finish(self, rounding_key: RoundingKey) -> None:
        made, param, before = self._states.pop(self._shadow, None), self._run.param, self._before or {}
        if made is None:
            return
        for key, value in made.items():
            if not (isinstance(value, Tensor) and value.dim() and value.shape == param.shape):
                made[key] = (
                    _rounded(value, before.get(key), self._run, key, rounding_key) if self._dtype is BF16 else value
                )
                continue
            dtype = BF16 if self._dtype is BF16 and _is_moment(value) else value.dtype
            kept = torch.empty_like(param, dtype=dtype, requires_grad=False) if key not in before else before[key]
            if dtype is value.dtype:
                local(kept).copy_(held_part(param, value))
            else:
                rounding_key.round_into(
                    local(kept), held_part(param, value), f"{self._run.name}.{key}", 0, self._run.box
                )
            made[key] = kept
        self._states[param] = made


def _gathered(value: Any) -> Any:
    """A state value as a step on a whole parameter sees it, of its own."""
    if not isinstance(value, Tensor):
        return value
    whole = value.full_tensor() if is_sharded(value) else value.clone()
    return _as_fp32(whole)


class SlicedState:
    """The state of one parameter through the steps of its slices.

    Tensors of the parameter's shape are shown as views. Everything else, a count of steps for instance, is shown to
    each slice as it was before the first, and kept as the last leaves it.
    """

    def __init__(self, states: dict, param: Parameter, dtype: torch.dtype) -> None:
        self._states, self._param, self._dtype = states, param, dtype
        self._old = states.get(param)
        self._new: dict[str, Any] = dict(self._old or {})

    def tensors(self) -> list[Tensor]:
        """What is shown as views."""
        return [local(v) for v in self._new.values() if self._is_full(v)]

    def _is_full(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self._param.shape

    def show(self, segment: Segment, shadow: Tensor) -> None:
        if self._old is None:
            return
        shown = {}
        for key, value in self._old.items():
            if self._is_full(value):
                value = self._part(segment, value)
            elif isinstance(value, Tensor):
                value = value.clone()
            shown[key] = value
        self._states[shadow] = shown

    def take(self, segment: Segment, shadow: Tensor, rounding_key: RoundingKey) -> None:
        for key, value in self._states.pop(shadow, {}).items():
            if isinstance(value, Tensor) and value.shape == shadow.shape:
                if self._new.get(key) is None:
                    dtype = BF16 if self._dtype is BF16 and _is_moment(value) else value.dtype
                    self._new[key] = torch.empty_like(self._param, dtype=dtype, requires_grad=False)
                self._put(segment, key, value, rounding_key)
            else:
                self._new[key] = value

    def _part(self, segment: Segment, value: Tensor) -> Tensor:
        """A part of the parameter's state as the weights are shown: a view if that is flat."""
        view = segment.flat(value)
        if view is None:
            view = torch.empty(segment.count, dtype=value.dtype, device=value.device)
            for block, part in segment.spread(view):
                part.copy_(block.of(value))
        return _as_fp32(view)

    def _put(self, segment: Segment, key: str, value: Tensor, rounding_key: RoundingKey) -> None:
        full = self._new[key]
        view = segment.flat(full)
        if view is not None and view.dtype is value.dtype and view.data_ptr() == value.data_ptr():
            return
        for block, part in segment.spread(value):
            if full.dtype is value.dtype:
                block.of(full).copy_(part)
            else:
                rounding_key.round_into(block.of(full), part, f"{segment.name}.{key}", block.at, block.box)

    def finish(self) -> None:
        """All slices are done."""
        if self._old is not None:
            self._old.update(self._new)
        elif self._new:
            self._states[self._param] = self._new
