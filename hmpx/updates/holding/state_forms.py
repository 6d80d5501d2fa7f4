"""Forms of optimizer state between two steps: as a step leaves it, in BF16, or in codes. Steps see FP32.

================  ================================================================  ==================
torch.float32     as the step leaves it                                             4 bytes an element
torch.bfloat16    rounded stochastically                                            2
codes of 8 bits   rounded stochastically, with a scale for each block of elements   1 and a 64th; more in
                  (`hmpx.rounding.state_codes`)                                     rows below 128
"4bit"            the same; as "8bit" in rows of an odd number of elements          a half and a 64th
================  ================================================================  ==================

The random numbers of a state tensor depend on its own name, ``parameter.key``. In BF16 are all FP32 tensors of several
elements; in codes are those of the parameter's shape, unless `held_dtype` says BF16. Three kinds of state stay as they
are in every form: tensors of one element, which may be counts of steps; tensors of another dtype, as masks; and weights
(`state_dtypes.py`).

To add a code, see `hmpx.rounding.state_codes`. To add another form, derive a class from `StateForm` and name it in
`STATE_FORMS`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from hmpx.base.tensors import dtype_name, shows_values
from hmpx.rounding.coding import BLOCK, StateCode
from hmpx.rounding.state_codes import STATE_CODES, code_of, is_coded
from hmpx.updates.holding.held import (
    HeldCodes,
    HeldState,
    HeldTensor,
    RoundingKey,
    Segment,
    StateDtype,
    checked_codes,
    held_states,
)
from hmpx.updates.holding.sharding import box_of, full, is_sharded, local
from hmpx.updates.holding.state_dtypes import (
    as_fp32,
    cast_state,
    filled_again,
    find_weights,
    is_bf16,
    is_moment,
    is_single,
    weight_keys,
    widen,
    with_groups,
)

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32


class StateForm:
    """One form of optimizer state. The base class holds state as the step leaves it, usually in FP32.

    Attributes:
        bytes_each: how many bytes an element of a state tensor takes.
        as_left: whether state is held as a step on a whole parameter leaves it.
        words: what it is held in, for `hmpx.explain`.
    """

    bytes_each: float = 4.0
    as_left: bool = True
    words: str = "float32"

    def adopt(self, optimizer: Optimizer, group: dict, segment: Segment, rounding_key: RoundingKey) -> bool:
        """Before a step, bring the state of a parameter to this form: a load may have brought another one.

        Returns:
            Whether BF16 state was cast to FP32. Beside FP32 state it is the optimizer's own choice, and stays.
        """
        return cast_state(optimizer, group, segment.param, BF16, FP32, name=segment.name, keeps_own=True)

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        """Return a holder for a state tensor of the parameter's shape: `before` if it has this form, else a new one.

        value: the state tensor that the step has left.
        """
        return before if isinstance(before, HeldState) else _like(param, value.dtype)

    def zeros(self, param: Tensor) -> HeldState:
        """Return a holder of zeros in the parameter's shape: a kernel begins with it."""
        return HeldTensor(torch.zeros_like(param, dtype=FP32, requires_grad=False))

    def other(self, value: Any, before: Any, name: str, rounding_key: RoundingKey) -> Any:
        """Return, as it is held, a state value that has not the parameter's shape."""
        return value


class InBF16(StateForm):
    """BF16, by stochastic rounding. State of other shapes, such as factored moments, is in BF16, too."""

    bytes_each = 2.0
    as_left = False
    words = "bfloat16, rounded stochastically"

    def adopt(self, optimizer: Optimizer, group: dict, segment: Segment, rounding_key: RoundingKey) -> bool:
        weights = weight_keys(optimizer)
        cast_state(optimizer, group, segment.param, FP32, BF16, but=weights, name=segment.name, lists=False)
        state = optimizer.state[segment.param]
        for key in [k for k, value in state.items() if is_bf16(value) and (k in weights or is_single(value))]:
            if not filled_again(optimizer, group, segment.param, key, FP32):
                state[key] = state[key].float()
        return False

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        fits = isinstance(before, HeldTensor) and before.tensor.dtype is BF16
        return before if fits else _like(param, BF16)

    def zeros(self, param: Tensor) -> HeldState:
        return HeldTensor(torch.zeros_like(param, dtype=FP32 if is_single(param) else BF16, requires_grad=False))

    def other(self, value: Any, before: Any, name: str, rounding_key: RoundingKey) -> Any:
        if not is_moment(value):
            return value
        reuse = is_moment(before) and before.dtype is BF16 and before.shape == value.shape
        out = before if reuse else torch.empty_like(value, dtype=BF16)
        rounding_key.round_into(local(out), local(value).float(), name, box_of(value, name))
        return out


class InCodes(StateForm):
    """Codes of a few bits, by stochastic rounding, with a scale for each block."""

    as_left = False

    def __init__(self, code: StateCode) -> None:
        self._code, self.bytes_each = code, code.bits / 8 + BF16.itemsize / BLOCK
        self.words = (
            f"{code.words} with a scale for {BLOCK} elements, rounded stochastically; bfloat16 of parameters of one "
            "dimension or cut along the last"
        )

    @torch.no_grad()
    def adopt(self, optimizer: Optimizer, group: dict, segment: Segment, rounding_key: RoundingKey) -> bool:
        p, state = segment.param, optimizer.state[segment.param]
        for key in [key for key, value in state.items() if is_bf16(value)]:
            filled_again(optimizer, group, p, key, FP32)
        if (checked := checked_codes(state, p, segment.name)) is not state:
            state.update(checked)
        weights = weight_keys(optimizer)
        for key, value in held_states(state, p, segment.name).items():
            if key in weights:
                for entry in value.entries(key) if isinstance(value, HeldCodes) else ():
                    del state[entry]
                state[key] = as_fp32(value.whole() if isinstance(value, HeldState) else value)
                continue
            in_other = isinstance(value, HeldCodes) and value.code is not self._code
            if in_other or (isinstance(value, HeldTensor) and is_moment(value.tensor)):
                codes = HeldCodes.new(self._code, p)
                # ".moved" gives other random numbers than the step's, which may round the same element again.
                codes.write(segment, value.whole(), f"{segment.name}.{key}.moved", rounding_key)
                for entry in value.entries(key):
                    del state[entry]
                state.update(codes.entries(key))
        return False

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        return before if isinstance(before, HeldCodes) else HeldCodes.new(self._code, param)

    def zeros(self, param: Tensor) -> HeldState:
        made = HeldCodes.new(self._code, param)
        for tensor, zero in zip((made.tensor, made.scales), made.code.zero, strict=True):
            tensor.fill_(zero)
        return made


def _like(param: Tensor, dtype: torch.dtype) -> HeldTensor:
    return HeldTensor(torch.empty_like(param, dtype=dtype, requires_grad=False))


AS_LEFT = StateForm()
STATE_FORMS: dict[StateDtype, StateForm] = {FP32: AS_LEFT, BF16: InBF16()}
STATE_FORMS |= {name: InCodes(code) for name, code in STATE_CODES.items()}


def form_of(segment: Segment) -> StateForm:
    return STATE_FORMS[segment.way.state_dtype]


def adopt_states(optimizer: Optimizer, segments: list[Segment], rounding_key: RoundingKey) -> bool:
    """Before a step, bring the state of each BF16 parameter to the form in which it is held.

    segments: the BF16 parameters. If another parameter has state in codes, that is cast to the parameter's dtype.

    Returns:
        Whether BF16 state was cast to FP32, in which it is held.
    """
    ours, found = {segment.param: segment for segment in segments}, False
    for name, (group, p) in enumerate(with_groups(optimizer)):
        state, segment = optimizer.state.get(p), ours.get(p)
        if isinstance(state, dict) and segment is not None:
            found = form_of(segment).adopt(optimizer, group, segment, rounding_key) or found
        elif isinstance(state, dict) and p.dtype is not BF16:
            widen(state, p, p.dtype, name)
    return found


def written(
    form: StateForm, segment: Segment, key: str, value: Any, before: Any, rounding_key: RoundingKey, shape: torch.Size
) -> Any:
    """Write a state value that a step has left for a parameter. Return it as it is held: a `HeldState`, or a value.

    Args:
        before: what was held under this key before the step.
        shape: of the weights that the optimizer has seen: those of this rank, or of all.
    """
    name, p = f"{segment.name}.{key}", segment.param
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in (BF16, FP32)
    if not is_dense or is_single(p) or value.shape != shape:
        return form.other(value, before.whole() if isinstance(before, HeldState) else before, name, rounding_key)
    holder = form.holder(p, value, before)
    if shape != p.shape or holder is not before or not _is_kept(holder, value):
        holder.write(segment, value, name, rounding_key)
    return holder


def _is_kept(held: HeldState, value: Tensor) -> bool:
    """Return whether a step (without a gradient) has left the held numbers, and rounding again would change them."""
    if not isinstance(held, HeldCodes) or held.code.is_stable or not shows_values(held.tensor):
        return False
    before = held.whole()
    differs = ((before if is_sharded(value) else full(before)) != value).any()
    return not full(differs)  # all ranks must decide alike


def state_name(dtype: StateDtype) -> str:
    """Return the name of a key of `STATE_FORMS`, such as ``"bfloat16"`` or ``"8bit"``."""
    return dtype if isinstance(dtype, str) else dtype_name(dtype)


def find_weights_of(optimizer: Optimizer, segments: list[Segment]) -> None:
    """Before a step, find the weights in state that a load or another setting has brought.

    hmpx itself leaves no FP32 tensor of a parameter's shape beside moments in another form, but weights.
    """
    keys, found = weight_keys(optimizer), list[tuple[str, Tensor, Tensor]]()
    for segment in segments if isinstance(keys, set) else ():
        state, form = optimizer.state.get(segment.param), form_of(segment)
        if form.as_left or not isinstance(state, dict):
            continue
        in_bf16 = isinstance(form, InBF16)
        given = {key: v for key, v in state.items() if is_moment(v) and v.shape == segment.param.shape}
        is_held = is_coded(state) or (in_bf16 and any(map(is_bf16, given.values())))
        for key, value in given.items():
            if key not in keys and not (in_bf16 and is_bf16(value)) and code_of(key) is None:
                if is_held and value.dtype is FP32:
                    keys |= {key}
                else:
                    found.append((key, value, segment.param))
    find_weights(keys, found)
