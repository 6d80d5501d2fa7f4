"""Forms of optimizer state between two steps: as left, in BF16 or in 8 bits. Steps see FP32.

================  ================================================================  ==================
torch.float32     as the step leaves it                                             4 bytes an element
torch.bfloat16    rounded stochastically                                            2
"8bit"            rounded stochastically, with a scale for each block of elements   1 and a 64th; more in
                  (`hmpx.rounding.eight_bits`)                                      rows below 128
================  ================================================================  ==================

The random numbers of a state tensor are those of its own name, ``parameter.key``. BF16 state is every floating tensor
with a dimension, 8-bit state what has the shape of the parameter; counts of steps stay as they are in every form.

To add a form, write a class with the methods of `StateForm` and name it in `STATE_FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch.optim import Optimizer

from hmpx.dtype_names import dtype_name
from hmpx.rounding.eight_bits import BLOCK
from hmpx.updates.holding.rounding_key import RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.state_blocks import StateBlocks
from hmpx.updates.holding.state_dtypes import cast_state, is_moment, prepare_for_8_bits
from hmpx.updates.holding.state_tensors import HeldCodes, HeldState, HeldTensor, held
from hmpx.updates.ranks.sharding import box_of, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16 = torch.bfloat16
StateDtype = torch.dtype | Literal["8bit"]


class StateForm(Protocol):
    """One form of optimizer state.

    Attributes:
        bytes_each: of an element of a state tensor.
        as_left: whether a step on a whole parameter leaves state as it is to be held.
    """

    bytes_each: ClassVar[float]
    as_left: ClassVar[bool]

    def adopt(
        self, optimizer: Optimizer, segments: list[Segment], rounding_key: RoundingKey, others: Collection[Parameter]
    ) -> bool:
        """Before a step, bring state that is held in another form to this one.

        Args:
            segments: the BF16 parameters whose state is held in this form.
            others: the BF16 parameters whose state is held in another form.

        Returns:
            Whether BF16 state was found where state is held in FP32.
        """

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        """The holder of a state tensor of the parameter's shape: `before` if it has this form, else a new one.

        value: the tensor, or a part of it.
        """

    def zeros(self, param: Tensor) -> HeldState:
        """A holder of zeros in the parameter's shape, for a kernel to begin with."""

    def other(self, value: Any, before: Any, name: str, rounding_key: RoundingKey) -> Any:
        """The held form of a value of another shape."""

    def ends(self, param: Tensor) -> Callable[[int], int] | None:
        """The last element up to a given one where a part of a parameter may end, in row-major order; None: any."""


def written(
    form: StateForm, segment: Segment, key: str, value: Any, before: Any, rounding_key: RoundingKey
) -> dict[str, Any]:
    """The held form of a state value that a step has left for a whole parameter."""
    name = f"{segment.name}.{key}"
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    if not is_dense or not value.dim() or value.shape != segment.param.shape:
        return {key: form.other(value, before.whole() if isinstance(before, HeldState) else before, name, rounding_key)}
    holder = form.holder(segment.param, value, before)
    holder.write(segment, value, name, rounding_key)
    return holder.entries(key)


class AsLeft:
    """State as the step leaves it, usually FP32."""

    bytes_each: ClassVar[float] = 4.0
    as_left: ClassVar[bool] = True

    def adopt(
        self, optimizer: Optimizer, segments: list[Segment], rounding_key: RoundingKey, others: Collection[Parameter]
    ) -> bool:
        return cast_state(optimizer, torch.float32, others=others)

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        return before if isinstance(before, HeldState) else _like(param, value.dtype)

    def zeros(self, param: Tensor) -> HeldState:
        return HeldTensor(torch.zeros_like(param, dtype=torch.float32, requires_grad=False))

    def other(self, value: Any, before: Any, name: str, rounding_key: RoundingKey) -> Any:
        return value

    def ends(self, param: Tensor) -> Callable[[int], int] | None:
        return None


class InBF16:
    """BF16, by stochastic rounding; state of other shapes, such as factored moments, too."""

    bytes_each: ClassVar[float] = 2.0
    as_left: ClassVar[bool] = False

    def adopt(
        self, optimizer: Optimizer, segments: list[Segment], rounding_key: RoundingKey, others: Collection[Parameter]
    ) -> bool:
        return cast_state(optimizer, BF16, lists=False, others=others)

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        dtype = BF16 if is_moment(value) else value.dtype
        fits = isinstance(before, HeldTensor) and before.tensor.dtype is dtype
        return before if fits else _like(param, dtype)

    def zeros(self, param: Tensor) -> HeldState:
        return HeldTensor(torch.zeros_like(param, dtype=BF16, requires_grad=False))

    def other(self, value: Any, before: Any, name: str, rounding_key: RoundingKey) -> Any:
        if not is_moment(value):
            return value
        reuse = is_moment(before) and before.dtype is BF16 and before.shape == value.shape
        out = before if reuse else torch.empty_like(value, dtype=BF16)
        rounding_key.round_into(local(out), local(value).float(), name, 0, box_of(value, name))
        return out

    def ends(self, param: Tensor) -> Callable[[int], int] | None:
        return None


class In8Bits:
    """Codes of 8 bits, by stochastic rounding, with a scale for each block."""

    bytes_each: ClassVar[float] = 1 + BF16.itemsize / BLOCK
    as_left: ClassVar[bool] = False

    @torch.no_grad()
    def adopt(
        self, optimizer: Optimizer, segments: list[Segment], rounding_key: RoundingKey, others: Collection[Parameter]
    ) -> bool:
        prepare_for_8_bits(optimizer, others)
        for segment in segments:
            state = optimizer.state.get(segment.param)
            if not isinstance(state, dict):
                continue
            for key, value in held(state, segment.param, segment.name).items():
                if isinstance(value, HeldTensor) and is_moment(value.tensor):
                    codes = HeldCodes.new(segment.param)
                    # Numbers of its own: the step may round the same element again.
                    codes.write(segment, value.tensor, f"{segment.name}.{key}.moved", rounding_key)
                    del state[key]
                    state.update(codes.entries(key))
        return False

    def holder(self, param: Tensor, value: Tensor, before: Any) -> HeldState:
        if not is_moment(value):
            return before if isinstance(before, HeldTensor) else _like(param, value.dtype)
        return before if isinstance(before, HeldCodes) else HeldCodes.new(param)

    def zeros(self, param: Tensor) -> HeldState:
        made = HeldCodes.new(param)
        made.tensor.zero_()
        made.scales.fill_(1)
        return made

    def other(self, value: Any, before: Any, name: str, rounding_key: RoundingKey) -> Any:
        return value

    def ends(self, param: Tensor) -> Callable[[int], int] | None:
        layout = StateBlocks.of(param)
        return (lambda element: 0) if layout.cut or layout.is_scattered else layout.rows.floor


def _like(param: Tensor, dtype: torch.dtype) -> HeldTensor:
    return HeldTensor(torch.empty_like(param, dtype=dtype, requires_grad=False))


STATE_FORMS: dict[StateDtype, StateForm] = {torch.float32: AsLeft(), BF16: InBF16(), "8bit": In8Bits()}


def form_of(segment: Segment) -> StateForm:
    """How the state of a parameter is held."""
    return STATE_FORMS[segment.way.state_dtype]


def state_name(dtype: StateDtype) -> str:
    """``"bfloat16"``, ``"8bit"``: a key of `STATE_FORMS` by its name."""
    return dtype if isinstance(dtype, str) else dtype_name(dtype)


def state_named(name: str) -> StateDtype:
    """The key of `STATE_FORMS` with this name."""
    return next(dtype for dtype in STATE_FORMS if state_name(dtype) == name)
