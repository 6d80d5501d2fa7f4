"""Casts optimizer state between dtypes.

In a step, the state of a BF16 parameter is FP32. Between steps it is held as `state_dtype` says (`state_forms.py`).
What finds it in another dtype casts it here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import optim
from torch._subclasses import FakeTensor

from hmpx.updates.holding.state_tensors import HeldCodes, HeldTensor, entries, held, is_coded
from hmpx.updates.ranks.sharding import is_sharded

Tensor = torch.Tensor
_PLAIN = (Tensor, FakeTensor)
Parameter = torch.nn.Parameter
BF16 = torch.bfloat16

# State that a constructor fills with an option, in the parameter's dtype: BF16 would keep 0.1 as 0.10009765625.
_FILLED_BY = ((optim.Adagrad, "sum", "initial_accumulator_value"),)

_OF_TORCH = tuple(c for c in vars(optim).values() if isinstance(c, type) and c is not optim.Optimizer)

# FP32 without a dimension in the state of torch's optimizers, whatever the parameter is: counts, rates, products.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu", "H_diag", "t"})

_keeping_bf16: weakref.WeakSet = weakref.WeakSet()  # optimizers whose own choice it is to keep some state in BF16


def cast_state(
    optimizer: optim.Optimizer, dtype: torch.dtype, *, lists: bool = True, others: Collection[Parameter] = ()
) -> bool:
    """Cast the state of BF16 parameters to FP32 or BF16, which hold 8-bit state exactly (BF16: from 2^-129 on).

    BF16 state, where FP32 is asked for, comes from earlier plain steps, from a constructor, or from a load that cast it
    down. Then all state of the parameter is BF16.

    Args:
        lists: cast the tensors in lists too, such as the history of LBFGS.
        others: parameters whose state is left alone.

    Returns:
        Whether FP32 was asked for and BF16 was found.
    """
    found = False
    wrong = torch.float32 if dtype is BF16 else BF16
    positions = itertools.count()
    for group in optimizer.param_groups:
        for p, i in zip(group["params"], positions, strict=False):
            if others and p in others:
                continue
            state = optimizer.state.get(p)
            if isinstance(state, dict):
                _widen(state, p, dtype if p.dtype is BF16 else p.dtype, i)
            if not isinstance(state, dict) or p.dtype is not BF16:
                continue
            keys = [key for key, v in state.items() if _holds(v, wrong) and (lists or not isinstance(v, list))]
            if not keys or (dtype is torch.float32 and _is_own(optimizer, state)):
                continue
            for key in keys:
                found = found or dtype is torch.float32
                if not _filled_again(optimizer, group, p, key, dtype):
                    state[key] = _cast(state[key], wrong, dtype)
    return found


def release_state(optimizer: optim.Optimizer) -> None:
    """Cast the state of BF16 parameters to BF16, for plain steps: that of parameters without a dimension, too."""
    cast_state(optimizer, BF16)
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("fused") else ():
            count = optimizer.state.get(p, {}).get("step")
            if isinstance(count, Tensor) and count.device != p.device:  # fused kernels of hmpx have it on the CPU
                optimizer.state[p]["step"] = count.to(p.device)
    for p in _without_dimension(optimizer):
        state = optimizer.state.get(p, {})
        for key in _scalar_moments(state):
            state[key] = state[key].to(BF16)


def prepare_for_8_bits(optimizer: optim.Optimizer, others: Collection[Parameter] = ()) -> None:
    """Bring state to a dtype that can be rounded to 8 bits, or that parameters of other dtypes want.

    What a constructor has filled with an option, in BF16, is made anew in FP32. That of `others` is left alone.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p)
            if not isinstance(state, dict) or p in others:
                continue
            if p.dtype is not BF16:
                _widen(state, p, p.dtype)
                continue
            for key in [key for key, value in state.items() if is_bf16(value)]:
                _filled_again(optimizer, group, p, key, torch.float32)


def _filled_again(optimizer: optim.Optimizer, group: dict, p: Parameter, key: str, dtype: torch.dtype) -> bool:
    """Whether a state value is what a constructor has filled with an option, and so was made anew in `dtype`."""
    state, option = optimizer.state[p], _filled_by(optimizer, key)
    if option is None or option not in group or state["step"] != 0:
        return False
    wrong = state[key].dtype
    state[key] = None  # frees its memory first; made again if there is none for the new tensor
    try:
        state[key] = torch.full_like(p, group[option], dtype=dtype, requires_grad=False)
    finally:
        if state[key] is None:
            state[key] = torch.empty_like(p, dtype=wrong, requires_grad=False).fill_(group[option])
    return True


def has_fp32_state(optimizer: optim.Optimizer) -> bool:
    """Whether BF16 parameters have FP32 or 8-bit state, which torch's own step cannot use."""
    if not isinstance(optimizer, _OF_TORCH):  # another's may hold FP32 state whatever the parameters are
        return False
    params = [p for group in optimizer.param_groups for p in group["params"] if p.dtype is BF16]
    states = [state for state in map(optimizer.state.get, params) if isinstance(state, dict)]
    held = any(is_coded(state) or any(_holds(v, torch.float32) for v in state.values()) for state in states)
    return held or any(_scalar_moments(optimizer.state.get(p, {})) for p in _without_dimension(optimizer))


def _without_dimension(optimizer: optim.Optimizer) -> list[Parameter]:
    """BF16 parameters of torch's optimizers; of another one, nobody knows which of its scalars are moments."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    ours = isinstance(optimizer, _OF_TORCH)
    return [p for p in params if ours and not p.dim() and p.dtype is BF16]


def _scalar_moments(state: Any) -> list[str]:
    """The keys of FP32 moments of a parameter without a dimension."""
    if not isinstance(state, dict):
        return []
    fp32 = (key for key, value in state.items() if _is_dense(value) and value.dtype is torch.float32)
    return [key for key in fp32 if key not in _SCALARS and not state[key].dim()]


def has_codes(optimizer: optim.Optimizer) -> bool:
    """Whether there is state in 8 bits."""
    return any(map(is_coded, optimizer.state.values()))


def cast_state_of(optimizer: optim.Optimizer, p: Parameter, held: Any) -> None:
    """Cast BF16 and 8-bit state of a parameter that is not BF16 any more to the parameter's dtype.

    State is BF16 if it was `held` in BF16, after plain steps and `detach`, or before the first step.
    """
    state = optimizer.state.get(p)
    if isinstance(state, dict):
        _widen(state, p, p.dtype)
    if not isinstance(state, dict) or (held is torch.float32 and _is_own(optimizer, state)):
        return
    group = next((group for group in optimizer.param_groups if any(p is q for q in group["params"])), {})
    for key, value in state.items():
        if not (is_bf16(value) and _filled_again(optimizer, group, p, key, p.dtype)):
            state[key] = _cast(value, BF16, p.dtype)


def _widen(state: dict, p: Parameter, dtype: torch.dtype, name: str | int = "") -> None:
    """Cast the 8-bit state of a parameter, if it has any, to another dtype."""
    if not is_coded(state):
        return
    seen = held(state, p, name)
    with torch.no_grad():
        try:
            for key, value in seen.items():  # one after the other, for the sake of memory
                if isinstance(value, HeldCodes):
                    state.clear()
                    seen[key] = HeldTensor(value.whole().to(dtype))
        finally:  # if there was no memory for one of them, it is still in 8 bits
            state.clear()
            state.update(entries(seen))


def _filled_by(optimizer: optim.Optimizer, key: str) -> str | None:
    return next((option for cls, name, option in _FILLED_BY if name == key and isinstance(optimizer, cls)), None)


def _holds(value: Any, dtype: torch.dtype) -> bool:
    """Whether a state value, or an item of a list, is a tensor of `dtype`.

    A count of steps is FP32 without a dimension, and is not meant.
    """
    if type(value) in _PLAIN:
        return value.dtype is dtype and (dtype is BF16 or value.dim() > 0)
    if isinstance(value, list):
        return any(_holds(item, dtype) for item in value)
    return _is_dense(value) and value.dtype is dtype and (value.dim() > 0 or dtype is BF16)


def _is_dense(value: Any) -> bool:
    """Whether a value is a plain tensor or a DTensor. Another class may hold its values in eight bits."""
    return type(value) in _PLAIN or is_sharded(value)


def _cast(value: Any, wrong: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(item, wrong, dtype) for item in value]
    return value.to(dtype) if _holds(value, wrong) else value


def keeps_bf16(optimizer: optim.Optimizer) -> None:
    """Record that an optimizer keeps BF16 state of FP32 parameters by its own choice: it stays BF16 from here on."""
    _keeping_bf16.add(optimizer)


def _is_own(optimizer: optim.Optimizer, state: dict) -> bool:
    """Whether the optimizer keeps BF16 state of FP32 parameters by its own choice."""
    others = (v for v in state.values() if _is_dense(v) and v.dtype is torch.float32)
    return optimizer in _keeping_bf16 or any(v.dim() for v in others)


def is_moment(value: Any) -> bool:
    """Whether a state value is a strided floating tensor with elements, such as a moment: held in `state_dtype`."""
    floating = _is_dense(value) and value.dtype in (BF16, torch.float32)
    return floating and value.dim() > 0 and value.layout is torch.strided


def is_bf16(value: Any) -> bool:
    """Whether a state value is a BF16 tensor."""
    return _is_dense(value) and value.dtype is BF16


def as_fp32(value: Any) -> Any:
    """A state value with its BF16 tensors, those in a list too, cast to FP32."""
    if isinstance(value, list):
        return [as_fp32(item) for item in value]
    return value.float() if is_bf16(value) else value
