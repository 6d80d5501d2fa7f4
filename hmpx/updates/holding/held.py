"""What a step moves: tensors that are held between two steps, each of one parameter or of its state.

A `Segment` says how a parameter is held, and where the elements that this rank holds stand in the whole one. Rounding
depends on this place, and on the `RoundingKey` of the step.

torch's fused kernels read weight, gradient and state as flat arrays. So tensors that are stepped together get one
layout, that of ``torch.empty_like(parameter)``: the parameter's own if it is dense, else a dense one.

A state tensor in codes of a few bits is two tensors in the state of its parameter: codes and scales. No optimizer knows
their keys, so a step that hmpx does not see fails, and does not take codes for numbers. Both are plain tensors, or
DTensors if the parameter is one, so whatever saves, moves or shards optimizer state can do so. `BlockLayout` says how
they lie.

State is in codes where each rank holds whole rows of its parameter, and so whole blocks. A parameter of one dimension
is a single row, which FSDP2 cuts: its state is in BF16, on one rank as on many. So is that of a parameter that is cut
along its last dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from hmpx.base.tensors import dtype_name, shows_values
from hmpx.errors import HmpxError, kind_of
from hmpx.rounding import native
from hmpx.rounding.coding import BlockLayout, CodeName, StateCode
from hmpx.rounding.shared import Keys, Span
from hmpx.rounding.state_codes import EIGHT_BITS, SCALES, STATE_CODES, code_of, is_coded
from hmpx.rounding.stochastic import Rounding, round_all
from hmpx.updates.holding.sharding import Box, full, held_part, is_cut_from, like, local, part_of, share

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16 = torch.bfloat16
Weights = Literal["stochastic", "nearest", "master", "split", "split8"]
StateDtype = torch.dtype | CodeName


def laid_as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy `tensor` into the layout of `torch.empty_like(like)`."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


class Way(NamedTuple):
    """How one BF16 parameter is held between two steps. See the arguments of `hmpx.attach` with these names.

    They are the settings that may differ from parameter to parameter. A `state_dtype` that is a string names codes.
    """

    weights: Weights = "stochastic"
    state_dtype: StateDtype = torch.float32


USUAL = Way()


@dataclass(frozen=True, eq=False)
class Segment:
    """The elements of one parameter that this rank holds.

    Attributes:
        box: where the elements of a shard stand in the whole parameter; None if the parameter is not sharded.
        way: how the parameter is held between steps.
    """

    param: Parameter
    name: str
    box: Box | None = None
    way: Way = USUAL

    def mark_written(self) -> None:
        """Tell autograd of a write to a shard: the version of the DTensor does not count writes to its local tensor."""
        if self.box is not None:
            torch.autograd.graph.increment_version(self.param)

    @property
    def first(self) -> int | None:
        """The index, in the whole parameter, of this rank's first element; None if its elements have gaps there."""
        return 0 if self.box is None else None if self.box.loops else self.box.offset

    @property
    def count(self) -> int:
        return local(self.param).numel()

    @property
    def share(self) -> int:
        """About how many elements a rank holds; the same number on all ranks, which must cut a step alike."""
        return share(self.param)


@dataclass(frozen=True)
class RoundingKey:
    """The seed and the number of one step. Its random numbers depend on these, on names and on indices of elements.

    Attributes:
        pending: the roundings that wait for `flush`, which does all of them in one call of the kernels.
    """

    seed: int
    step: int
    pending: list[Rounding] = field(default_factory=list, compare=False, repr=False)

    def round_into(self, out: Tensor, x: Tensor, name: str, box: Box | None) -> None:
        """Let the next `flush` round FP32 `x` into BF16 `out`, which has the same shape.

        Args:
            name: the name of the parameter, or of a state tensor.
            box: where these elements stand in the whole parameter; None if it is not sharded.
        """
        self.pending.append(Rounding(out, x, name, self.spans(x.numel(), box)))

    def flush(self) -> None:
        pending = self.pending[:]
        self.pending.clear()
        if pending:
            round_all(pending, self.seed, self.step)

    def keys(self, name: str) -> Keys:
        """Return the seed, the step and the name, from which the keys of the random numbers are derived."""
        return self.seed, self.step, name

    @staticmethod
    def spans(count: int, box: Box | None) -> list[Span]:
        """Return where `count` elements stand in the whole parameter; see `round_into`."""
        return [Span(0, count, 0, max(count, 1), 0)] if box is None else list(box.spans(0, count))


class Held:
    """A tensor that is held between two steps, with the data beside it. All methods need `torch.no_grad()`.

    Attributes:
        tensor: a gradient, weights or state, in the shape of the parameter or in another one.
        kind: the number by which kernels know this way to hold a tensor. None: no kernel knows it, and torch's
            operators move the tensor.
    """

    kind: int | None = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        """Return the held tensor, which is contiguous, in the form that kernels take; None if they cannot take it.

        name: the hash of the name on which the random numbers depend.
        """
        return None if self.kind is None else native.StoredTensor(local(self.tensor.detach()), self.kind, name)

    def read(self, segment: Segment, out: Tensor) -> None:
        """Copy what this rank holds into `out`, in FP32."""
        out.copy_(local(self.tensor))

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Write the FP32 result back.

        name: the name on which the random numbers depend.
        """
        raise NotImplementedError


def held_dtype(asked: StateDtype, param: Tensor) -> StateDtype:
    """Return the `state_dtype` in which the state of a parameter is held if this one is asked for."""
    if not isinstance(asked, str):
        return asked
    layout = BlockLayout.of(param.shape)
    if param.dim() < 2 or param.numel() == 1 or is_cut_from(param, layout.folded):
        return BF16
    return EIGHT_BITS.name if layout.row % STATE_CODES[asked].per_byte else asked


class HeldState(Held):
    """A state tensor of a parameter's shape."""

    def whole(self) -> Tensor:
        """Return the whole state tensor, in a dtype that holds it exactly. It is sharded as the parameter is."""
        return self.tensor

    def entries(self, key: str) -> dict[str, Tensor]:
        """Return this tensor as entries of the parameter's state. key: the optimizer's own key of it."""
        return {key: self.tensor}


class HeldTensor(HeldState):
    """An FP32 tensor, or a BF16 one that is written by stochastic rounding."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.kind = native.BF16 if tensor.dtype is BF16 else None

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        x, held = part_of(segment.param, x), local(self.tensor)
        if held.dtype is x.dtype:
            held.copy_(x)
        else:
            assert held.dtype is BF16, "kernels write two bytes an element"
            rounding_key.round_into(held, x, name, segment.box)


class HeldCodes(HeldState):
    """A tensor in codes of a few bits.

    Attributes:
        code: what the codes mean.
        tensor: the codes, uint8, contiguous, of the shape that `BlockLayout` says.
        scales: one BF16 number for each block. The last dimension counts the blocks of a row; those before it are the
            parameter's, up to `BlockLayout.folded`.
    """

    def __init__(self, code: StateCode, codes: Tensor, scales: Tensor, param: Tensor) -> None:
        super().__init__(codes)
        self.code, self.scales, self._param, self._layout = code, scales, param, BlockLayout.of(param.shape)

    @classmethod
    def new(cls, code: StateCode, param: Tensor) -> HeldCodes:
        """Allocate codes and scales for the state of a parameter, without values."""
        held, layout = local(param), BlockLayout.of(param.shape)
        wholes, parts = layout.shapes(code, param.shape), layout.shapes(code, held.shape)
        codes = torch.empty(parts[0], dtype=torch.uint8, device=held.device)
        scales = torch.empty(parts[1], dtype=BF16, device=held.device)
        return cls(code, like(param, codes, wholes[0]), like(param, scales, wholes[1], layout.folded), param)

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        if self.code.kind is None:
            return None
        codes, scales = local(self.tensor), local(self.scales).detach()  # keeps alive what a plan writes to
        return native.StoredTensor(codes, self.code.kind, name, scales, row=self._layout.row)

    def read(self, segment: Segment, out: Tensor) -> None:
        flat = out if out.is_contiguous() else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self.code.decode(flat.view(-1), self._flat())
        if flat is not out:
            out.copy_(flat)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        x = part_of(self._param, x).float().contiguous().view(-1)
        self.code.encode(self._flat(), x, rounding_key.spans(x.numel(), segment.box), rounding_key.keys(name))

    def _flat(self) -> native.StoredTensor:
        codes = local(self.tensor).view(-1)
        return native.StoredTensor(codes, self.code.kind or 0, beside=local(self.scales), row=self._layout.row)

    def whole(self) -> Tensor:
        param = self._param
        if is_cut_from(param, self._layout.folded):  # hmpx 0.2 and before held such state in codes
            codes = full(self.tensor)
            whole = HeldCodes(self.code, codes, full(self.scales), codes).whole()
            return like(param, held_part(param, whole).contiguous())
        out = torch.empty(local(param).shape, dtype=torch.float32, device=local(self.tensor).device)
        self.code.decode(out.view(-1), self._flat())
        return like(param, out)

    def entries(self, key: str) -> dict[str, Tensor]:
        return {self.code.prefix + key: self.tensor, SCALES + key: self.scales}


def checked_codes(state: Mapping[str, Any], param: Tensor, name: str | int = "") -> Mapping[str, Any]:
    """Check that state in codes fits its parameter: a load may have brought another one's, or other dtypes.

    name: the name or the position of the parameter, for the error; "" if nobody knows it.

    Returns:
        The state, with codes and scales in their own dtypes and contiguous, as kernels read them.

    Raises:
        HmpxError: codes or scales are missing, have lost something in another dtype, or are no tensors; the same state
            is there in another form; the code or a shape does not fit the parameter, or this rank holds another part.
    """
    of, found = "a parameter" if name == "" else f"parameter {name!r}", state
    for key, codes in state.items():
        code = code_of(key)
        if code is None:
            own = key.removeprefix(SCALES) if isinstance(key, str) and key.startswith(SCALES) else None
            if own is not None and not any(each.prefix + own in state for each in STATE_CODES.values()):
                raise HmpxError(f"{key!r} of {of} are scales without codes of {own!r}: load both, or neither")
            continue
        layout, own = BlockLayout.of(param.shape), key.removeprefix(code.prefix)
        if own in state:
            raise HmpxError(
                f"{own!r} of {of} is there twice: in {code.bits} bits, as hmpx holds it between steps, and as somebody "
                "has made it since, who does not know that. If a method of the optimizer has, beside step(), name it: "
                "hmpx.attach(optimizer, methods=[...])"
            )
        if SCALES + own not in state:
            raise HmpxError(
                f"{own!r} of {of} is in {code.bits} bits without its scales: there is no {SCALES + own!r}; load both, "
                "or neither"
            )
        scales = state[SCALES + own]
        for each, value, dtype in ((key, codes, torch.uint8), (SCALES + own, scales, BF16)):
            if not isinstance(value, Tensor) or value.dtype is not dtype or not local(value).is_contiguous():
                found = {**found, each: _cast_back(value, dtype, f"{each!r} of {of}").contiguous()}
        given = (codes, scales), (local(codes), local(scales))
        kept = [(tuple(one.shape), tuple(other.shape)) for one, other in given]
        fits = [tuple(map(tuple, layout.shapes(code, p.shape))) for p in (param, local(param))]
        if kept != fits or layout.row % code.per_byte:
            raise HmpxError(
                f"{own!r} of {of} is in {code.bits} bits for another shape, or sharded in another way: {kept[0][0]} "
                f"with scales {kept[0][1]}, of which this rank has {kept[1][0]} with {kept[1][1]}; the parameter's is "
                f"{fits[0][0]} with {fits[0][1]}, here {fits[1][0]} with {fits[1][1]}. Load what was saved of this "
                "parameter, or leave its state out, and it begins anew"
            )
    return found


def _cast_back(value: Any, dtype: torch.dtype, what: str) -> Tensor:
    """Return codes or scales that somebody has cast in their own dtype.

    Raises:
        HmpxError: `value` is no tensor, its dtype does not hold all numbers of their own, or it has another number.
    """
    if not isinstance(value, Tensor):
        raise HmpxError(f"{what} is {kind_of(value)}, not a tensor of {dtype_name(dtype)}")
    if _holds_all(dtype, value.dtype):
        back, given = value.to(dtype), local(value)
        again = local(back).to(value.dtype)
        if not shows_values(given) or bool(((again == given) | (again.isnan() & given.isnan())).all()):
            return back
    raise HmpxError(
        f"{what} is {dtype_name(value.dtype)}, in which numbers of {dtype_name(dtype)} were lost: save and load the "
        "optimizer's state without a cast of each tensor"
    )


@functools.cache
def _holds_all(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether another dtype holds all codes, or all scales."""
    if other.is_complex:
        return False
    some = range(256) if dtype is torch.uint8 else (1.0078125, 2.0**-126, 3e38, -1.5)
    every = torch.tensor(list(some), dtype=dtype, device="cpu")
    return torch.equal(every.to(other).to(dtype), every)


def held_states(state: Mapping[str, Any], param: Tensor, name: str | int = "") -> dict[str, Any]:
    """Return a parameter's state by the optimizer's own keys, with tensors of the parameter's shape as `HeldState`.

    Raises:
        HmpxError: as `checked_codes`.
    """
    state, found = checked_codes(state, param, name), dict[str, Any]()
    for key, value in state.items():
        name = key if isinstance(key, str) else ""
        code = code_of(name)
        if code is not None:
            own = name.removeprefix(code.prefix)
            found[own] = HeldCodes(code, value, state[SCALES + own], param)
        elif not name.startswith(SCALES):
            is_dense = (
                isinstance(value, Tensor) and value.layout is torch.strided and value.dtype in (BF16, torch.float32)
            )
            found[key] = HeldTensor(value) if is_dense and value.shape == param.shape else value
    return found


def entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the optimizer's state. This undoes `held_states`."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found.update(value.entries(key) if isinstance(value, HeldState) else {key: value})
    return found


def by_own_keys(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a parameter by the optimizer's own keys. For a tensor in codes, the value is its codes."""
    if not is_coded(state):
        return state
    coded = {key: code_of(key) for key in state}
    own = {key: key if code is None else key.removeprefix(code.prefix) for key, code in coded.items()}
    return {own[key]: value for key, value in state.items() if not key.startswith(SCALES)}
