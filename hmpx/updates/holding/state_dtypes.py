"""Casts optimizer state between dtypes, and finds the weights in it, which are held as the step leaves them.

In a step, the state of a BF16 parameter is FP32. Between steps it is held as `state_dtype` says (`state_forms.py`).
State that is found in another dtype is cast here: after plain steps, a constructor or a load that cast it down, and
before plain steps.

Some optimizers keep weights in their state: SAM before its ascent, Lookahead's slow ones, schedule-free's z. A code of
8 or 4 bits is for moments. Weights in it would lose their digits between two steps, and stochastic rounding to BF16
those of masters.

Nobody says what a tensor of state is. It is weights if it is near the parameters' when the optimizer first keeps it,
over all of them: no farther than half of their norm, or than half of that of a multiple of them, such as a sum, a
quarter of them or more. A moment is farther away than the norm itself, and points elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Set
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import optim

from hmpx.base.tensors import shows_values
from hmpx.base.torch_private import FakeTensor
from hmpx.rounding.coding import StateCode
from hmpx.rounding.state_codes import code_of, is_coded
from hmpx.updates.holding.held import HeldCodes, HeldTensor, entries, held_states
from hmpx.updates.holding.sharding import full, is_sharded

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16, FP32 = torch.bfloat16, torch.float32

# State that a constructor fills with an option, in the parameter's dtype: BF16 would keep 0.1 as 0.10009765625.
_FILLED_BY = ((optim.Adagrad, "sum", "initial_accumulator_value"),)

_OF_TORCH = tuple(c for c in vars(optim).values() if isinstance(c, type) and c is not optim.Optimizer)

# FP32 without a dimension in the state of torch's optimizers, whatever the parameter is: counts, rates, products.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu", "H_diag", "t"})

_keeping_bf16: WeakSet = WeakSet()  # optimizers that keep some state in BF16 by their own choice


def with_groups(optimizer: optim.Optimizer) -> Iterator[tuple[dict, Parameter]]:
    """Yield every parameter of `optimizer` with its group."""
    return ((group, p) for group in optimizer.param_groups for p in group["params"])


def cast_state(
    optimizer: optim.Optimizer,
    group: dict,
    p: Parameter,
    wrong: torch.dtype,
    dtype: torch.dtype,
    *,
    but: Collection[str] = (),
    name: str | int = "",
    lists: bool = True,
    keeps_own: bool = False,
) -> bool:
    """Cast the state of one parameter from `wrong` to `dtype`, and state in codes to `dtype`, to nearest.

    BF16 holds the numbers of 8 bits exactly, and those of 4 bits are rounded to it.

    Args:
        but: keys of values that stay as they are.
        name: of the parameter, for errors.
        lists: cast the tensors in lists too, such as the history of LBFGS.
        keeps_own: leave BF16 state that the optimizer keeps for FP32 parameters by its own choice.

    Returns:
        Whether something was found in `wrong` that its constructor has not filled with an option.
    """
    state = optimizer.state.get(p)
    if not isinstance(state, dict):
        return False
    widen(state, p, dtype, name)
    keys = [
        key for key, v in state.items() if key not in but and _holds(v, wrong) and (lists or not isinstance(v, list))
    ]
    if not keys or (keeps_own and _is_own(optimizer, state)):
        return False
    others = [key for key in keys if not filled_again(optimizer, group, p, key, dtype)]
    for key in others:
        state[key] = _cast(state[key], wrong, dtype)
    return bool(others)


def cast_along(optimizer: optim.Optimizer, p: Parameter, was_held: Any) -> None:
    """Cast the state of a parameter that is no longer BF16 to the parameter's dtype.

    State is BF16 if it `was_held` in BF16, after plain steps and `detach`, or before the first step.
    """
    group = next((group for group, q in with_groups(optimizer) if q is p), {})
    cast_state(optimizer, group, p, BF16, p.dtype, keeps_own=was_held is FP32)


def release_state(optimizer: optim.Optimizer) -> None:
    """Cast the state of each parameter to the parameter's dtype, for plain steps."""
    for name, (group, p) in enumerate(with_groups(optimizer)):
        state = optimizer.state.get(p)
        if isinstance(state, dict) and p.dtype is not BF16:
            widen(state, p, p.dtype, name)
        elif isinstance(state, dict):
            cast_state(optimizer, group, p, FP32, BF16, name=name)
            for key in _scalar_moments(optimizer, p):
                state[key] = state[key].to(BF16)
        count = state.get("step") if isinstance(state, dict) and group.get("fused") else None
        if isinstance(count, Tensor) and count.device != p.device:  # fused kernels of hmpx have it on the CPU
            optimizer.state[p]["step"] = count.to(p.device)


def filled_again(optimizer: optim.Optimizer, group: dict, p: Parameter, key: str, dtype: torch.dtype) -> bool:
    """Make a state value that a constructor has filled with an option anew, in `dtype`; return whether it was one.

    Elements that somebody has given other values since are no such value.
    """
    named = (option for cls, name, option in _FILLED_BY if name == key and isinstance(optimizer, cls))
    state, option = optimizer.state[p], next(named, None)
    if option is None or option not in group or state["step"] != 0:
        return False
    wrong = state[key].dtype
    if shows_values(state[key]) and state[key].numel():
        exact = torch.tensor(group[option], dtype=torch.float32, device="cpu")
        least, most = (full(x).float().cpu() for x in (state[key].min(), state[key].max()))  # without more memory
        if least != most or least not in (exact.to(wrong).float(), exact.to(BF16).float()):
            return False
    state[key] = None  # frees its memory first; made again if there is none for the new tensor
    try:
        state[key] = torch.full_like(p, group[option], dtype=dtype, requires_grad=False)
    finally:
        if state[key] is None:
            state[key] = torch.empty_like(p, dtype=wrong, requires_grad=False).fill_(group[option])
    return True


def widen(state: dict, p: Parameter, dtype: torch.dtype, name: str | int = "") -> None:
    """Cast the state of a parameter that is in codes, if it has any, to another dtype."""
    if not is_coded(state):
        return
    seen = held_states(state, p, name)
    with torch.no_grad():
        try:
            for key, value in seen.items():  # one after the other, for the sake of memory
                if isinstance(value, HeldCodes):
                    state.clear()
                    seen[key] = HeldTensor(value.whole().to(dtype))
        finally:  # if there was no memory for one of them, it is still in codes
            state.clear()
            state.update(entries(seen))


def has_fp32_state(optimizer: optim.Optimizer) -> bool:
    """Return whether BF16 parameters have FP32 state or codes, which torch's own step cannot use."""
    if not isinstance(optimizer, _OF_TORCH):  # another's may hold FP32 state whatever the parameters are
        return False
    params = [p for _, p in with_groups(optimizer) if p.dtype is BF16 and isinstance(optimizer.state.get(p), dict)]
    states = [optimizer.state[p] for p in params]
    held = any(is_coded(state) or any(_holds(v, FP32) for v in state.values()) for state in states)
    return held or any(_scalar_moments(optimizer, p) for p in params)


def code_in(optimizer: optim.Optimizer) -> StateCode | None:
    """Return the code that some state is in; None if there is none."""
    keys = (key for state in optimizer.state.values() if isinstance(state, dict) for key in state)
    return next(filter(None, map(code_of, keys)), None)


def _scalar_moments(optimizer: optim.Optimizer, p: Parameter) -> list[str]:
    """Return the keys of FP32 moments of a parameter of one element.

    Of an optimizer that is not torch's, nobody knows which scalars are moments.
    """
    if not is_single(p) or not isinstance(optimizer, _OF_TORCH):
        return []
    fp32 = (key for key, value in optimizer.state[p].items() if _is_dense(value) and value.dtype is FP32)
    return [key for key in fp32 if key not in _SCALARS and is_single(optimizer.state[p][key])]


def _holds(value: Any, dtype: torch.dtype) -> bool:
    """Return whether a state value, or an item of a list, is a tensor of `dtype`, but for FP32 counts of steps."""
    if isinstance(value, list):
        return any(_holds(item, dtype) for item in value)
    return _is_dense(value) and value.dtype is dtype and (dtype is BF16 or not is_single(value))


def _is_dense(value: Any) -> bool:
    """Return whether a value is a plain tensor or a DTensor. Another class may hold its values in eight bits."""
    return type(value) is Tensor or isinstance(value, FakeTensor) or is_sharded(value)


def _cast(value: Any, wrong: torch.dtype, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast(item, wrong, dtype) for item in value]
    return value.to(dtype) if _holds(value, wrong) else value


def keeps_bf16(optimizer: optim.Optimizer) -> None:
    """Record that an optimizer keeps BF16 state of FP32 parameters by its own choice: it stays BF16 from here on."""
    _keeping_bf16.add(optimizer)


def _is_own(optimizer: optim.Optimizer, state: dict) -> bool:
    """Return whether the optimizer keeps BF16 state of FP32 parameters by its own choice."""
    others = (v for v in state.values() if _is_dense(v) and v.dtype is FP32)
    return optimizer in _keeping_bf16 or not all(map(is_single, others))


def is_moment(value: Any) -> bool:
    """Return whether a state value is a strided FP32 or BF16 tensor of several elements: held in `state_dtype`."""
    return _is_dense(value) and value.dtype in (BF16, FP32) and not is_single(value) and value.layout is torch.strided


def is_single(tensor: Tensor) -> bool:
    """Return whether a tensor has one element. In state it may be a count, and is held as it is."""
    return tensor.numel() == 1


def is_bf16(value: Any) -> bool:
    return _is_dense(value) and value.dtype is BF16


def as_fp32(value: Any) -> Any:
    """Cast the BF16 tensors in a state value, those in a list too, to FP32."""
    return _cast(value, BF16, FP32)


_NEAR = 0.25  # of the squared norm of the weights, or of a multiple of them
_LEAST = 0.25  # of all multiples: what is smaller is taken for a moment
_FEW = 32  # elements: any direction may be near that of fewer weights
_weight_keys: WeakKeyDictionary[optim.Optimizer, set[str]] = WeakKeyDictionary()


def weight_keys(optimizer: optim.Optimizer) -> Set[str]:
    """Return the keys of state that are known to be weights; the same set in every call. torch's classes have none."""
    return frozenset() if type(optimizer) in _OF_TORCH else _weight_keys.setdefault(optimizer, set())


def find_weights(keys: Set[str], found: Iterable[tuple[str, Tensor, Tensor]]) -> None:
    """Add to `keys` those of `found` that are weights: keys, state tensors, and the weights of their parameters."""
    sums, counts = dict[str, Tensor](), Counter[str]()
    if not isinstance(keys, set):
        return
    for key, value, weights in found:
        if shows_values(value) and is_sharded(value) == is_sharded(weights):
            w, v = weights.detach().float(), value.detach().float()
            pairs = (v - w, v - w), (w, w), (v, w), (v, v)
            of_one = torch.stack([full((a * b).sum()) for a, b in pairs]).double().cpu()
            sums[key] = sums[key] + of_one if key in sums else of_one
            counts[key] += v.numel()
    for key, of_all in sums.items():
        far, norm, along, own = of_all.tolist()
        if not norm or not math.isfinite(far + own):
            continue
        along /= norm  # the multiple of the weights that is nearest, and how far the state is from it
        is_multiple = abs(along) >= _LEAST and own - along**2 * norm <= _NEAR * along**2 * norm and counts[key] >= _FEW
        if far <= _NEAR * norm or is_multiple:
            keys.add(key)


def find_again(optimizer: optim.Optimizer, keys: Iterable[str]) -> None:
    """Take over the keys of weights that the original of a copy has."""
    _weight_keys[optimizer] = set(keys)
