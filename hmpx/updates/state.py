"""Optimizer state between two steps and during one.

During a step the state of a BF16 parameter is FP32 and belongs to its shadow. Between steps it is held in FP32, or in
BF16 if `state_dtype` says so, rounded stochastically.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import optim

from hmpx.sharding import box_of, held_part, is_sharded, local
from hmpx.updates.weights import Numbers, Run

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16 = torch.bfloat16

# State that a constructor fills with an option, in the parameter's dtype: BF16 would keep 0.1 as 0.10009765625.
_FILLED_BY = ((optim.Adagrad, "sum", "initial_accumulator_value"),)

_own_bf16: weakref.WeakSet = weakref.WeakSet()  # optimizers whose own choice it is to keep some state in BF16


def settle(optimizer: optim.Optimizer, dtype: torch.dtype, *, lists: bool = True) -> bool:
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
            keys = [key for key, v in state.items() if _has(v, wrong) and (lists or not isinstance(v, list))]
            if not keys or (dtype is torch.float32 and _is_own(optimizer, state)):
                continue
            for key in keys:
                found = found or dtype is torch.float32
                option = _filled_by(optimizer, key)
                if option is not None and state["step"] == 0:
                    state[key] = None  # gone before its successor comes
                    state[key] = torch.full_like(p, group[option], dtype=dtype, requires_grad=False)
                else:
                    state[key] = _brought(state[key], wrong, dtype)
    return found


def _filled_by(optimizer: optim.Optimizer, key: str) -> str | None:
    return next((option for cls, name, option in _FILLED_BY if name == key and isinstance(optimizer, cls)), None)


def _has(value: Any, dtype: torch.dtype) -> bool:
    """Whether a state value, or an item of a list, is a tensor of `dtype`.

    A count of steps is FP32 without a dimension, and is not meant.
    """
    if isinstance(value, list):
        return any(_has(item, dtype) for item in value)
    return _is_dense(value) and value.dtype is dtype and (value.dim() > 0 or dtype is BF16)


def _is_dense(value: Any) -> bool:
    """A tensor whose numbers are what they seem, sharded or not; another class may hold them in eight bits."""
    return type(value) is Tensor or is_sharded(value)


def _brought(value: Any, wrong: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_brought(item, wrong, dtype) for item in value]
    return value.to(dtype) if _has(value, wrong) else value


def _is_own(optimizer: optim.Optimizer, state: dict) -> bool:
    """Whether the optimizer keeps BF16 state of FP32 parameters by its own choice."""
    others = (v for v in state.values() if _is_dense(v) and v.dtype is torch.float32)
    return optimizer in _own_bf16 or any(v.dim() for v in others)


def _is_held(value: Any) -> bool:
    """A tensor of moments or the like."""
    floating = _is_dense(value) and value.dtype in (BF16, torch.float32)
    return floating and value.dim() > 0 and value.layout is torch.strided


def _is_bf16(value: Any) -> bool:
    return _is_dense(value) and value.dtype is BF16


def _widened(value: Any) -> Any:
    return value.float() if _is_bf16(value) else value


def _rounded(value: Any, before: Any, run: Run, key: str, numbers: Numbers) -> Any:
    """A state value after a step, held in BF16, in the tensor that held it before where there is one."""
    if not _is_held(value):
        return value
    reuse = _is_held(before) and before.dtype is BF16 and before.shape == value.shape
    out = before if reuse else torch.empty_like(value, dtype=BF16)
    name = f"{run.name}.{key}"
    numbers.round_into(local(out), local(value), name, 0, box_of(value, name))
    return out


class Handover:
    """The state of one whole parameter, with its shadow for the length of a step."""

    def __init__(self, optimizer: optim.Optimizer, run: Run, shadow: Tensor, dtype: torch.dtype) -> None:
        self._optimizer, self._run, self._shadow, self._dtype = optimizer, run, shadow, dtype
        self._states = states = optimizer.state
        self._before = states.pop(run.param, None)
        if self._before is None:
            return
        held_as_is = dtype is torch.float32 or not isinstance(self._before, dict)
        states[shadow] = self._before if held_as_is else {k: _widened(v) for k, v in self._before.items()}

    def finish(self, numbers: Numbers) -> None:
        """The step is done: what it left belongs to the parameter."""
        made = self._states.pop(self._shadow, None)
        if made is None:
            return
        if self._dtype is BF16 and isinstance(made, dict):
            before = self._before or {}
            kept = {k: _rounded(v, before.get(k), self._run, k, numbers) for k, v in made.items()}
            made.clear()
            made.update(kept)
        elif self._before is None and isinstance(made, dict) and any(map(_is_bf16, made.values())):
            _own_bf16.add(self._optimizer)
        self._states[self._run.param] = made

    def undo(self) -> None:
        """The step raised: the parameter has its old state again, or none."""
        self._states.pop(self._shadow, None)
        if self._before is not None:
            self._states[self._run.param] = self._before


class GatheredHandover(Handover):
    """That of a sharded parameter, for a step that sees the whole of it: only the part that this rank holds is kept.

    What has another shape than the parameter, such as factored moments, is whole on every rank, and the same.
    """

    def __init__(self, optimizer: optim.Optimizer, run: Run, shadow: Tensor, dtype: torch.dtype) -> None:
        super().__init__(optimizer, run, shadow, dtype)
        if self._before is not None:
            self._states[shadow] = {key: _whole(value) for key, value in self._before.items()}

    def finish(self, numbers: Numbers) -> None:
        made, param, before = self._states.pop(self._shadow, None), self._run.param, self._before or {}
        if made is None:
            return
        for key, value in made.items():
            if not (isinstance(value, Tensor) and value.dim() and value.shape == param.shape):
                made[key] = _rounded(value, before.get(key), self._run, key, numbers) if self._dtype is BF16 else value
                continue
            dtype = BF16 if self._dtype is BF16 and _is_held(value) else value.dtype
            kept = torch.empty_like(param, dtype=dtype, requires_grad=False) if key not in before else before[key]
            if dtype is value.dtype:
                local(kept).copy_(held_part(param, value))
            else:
                numbers.round_into(local(kept), held_part(param, value), f"{self._run.name}.{key}", 0, self._run.box)
            made[key] = kept
        self._states[param] = made


def _whole(value: Any) -> Any:
    """A state value as a step on a whole parameter sees it, of its own."""
    if not isinstance(value, Tensor):
        return value
    whole = value.full_tensor() if is_sharded(value) else value.clone()
    return _widened(whole)


class SlicedState:
    """The state of one parameter through the steps of its slices.

    Tensors of the parameter's shape are shown as views. Everything else, a count of steps for instance, is shown to
    each slice as it was before the first, and kept as the last leaves it.
    """

    def __init__(self, states: dict, param: Parameter, dtype: torch.dtype) -> None:
        self._states, self._param, self._dtype = states, param, dtype
        self._old = states.get(param)
        self._new: dict[str, Any] = dict(self._old or {})

    def is_contiguous(self) -> bool:
        """Whether all that is shown as views can be shown flat."""
        return all(local(v).is_contiguous() for v in self._new.values() if self._is_full(v))

    def _is_full(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self._param.shape

    def show(self, run: Run, shadow: Tensor) -> None:
        if self._old is None:
            return
        shown = {}
        for key, value in self._old.items():
            if self._is_full(value):
                value = _widened(run.of(value))
            elif isinstance(value, Tensor):
                value = value.clone()
            shown[key] = value
        self._states[shadow] = shown

    def take(self, run: Run, shadow: Tensor, numbers: Numbers) -> None:
        for key, value in self._states.pop(shadow, {}).items():
            if isinstance(value, Tensor) and value.shape == shadow.shape:
                if self._new.get(key) is None:
                    dtype = BF16 if self._dtype is BF16 and _is_held(value) else value.dtype
                    self._new[key] = torch.empty_like(self._param, dtype=dtype, requires_grad=False)
                full = run.of(self._new[key])
                if full.dtype is not value.dtype:
                    numbers.round_into(full, value, f"{run.name}.{key}", run.offset, run.box)
                elif full.data_ptr() != value.data_ptr():
                    full.copy_(value)
            else:
                self._new[key] = value

    def finish(self) -> None:
        """All slices are done."""
        if self._old is not None:
            self._old.update(self._new)
        elif self._new:
            self._states[self._param] = self._new
