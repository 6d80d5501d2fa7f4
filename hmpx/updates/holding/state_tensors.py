"""Holders of one state tensor between two steps: as it is, or in codes of a few bits.

A tensor in codes is two tensors in the state of its parameter: codes and scales. No optimizer knows their keys, so a
step that hmpx does not see fails, and does not take codes for numbers. Both are plain tensors, or DTensors if the
parameter is one, so whatever saves, moves or shards optimizer state can do so. `StateBlocks` says how they lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist

from hmpx.base.dtype_names import dtype_name
from hmpx.errors import HmpxError, kind_of
from hmpx.rounding import native
from hmpx.rounding.coding import BLOCK, BlockCodes, Rows, StateCode
from hmpx.rounding.devices import shows_values
from hmpx.rounding.state_codes import EIGHT_BITS, SCALES, STATE_CODES, code_of
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.ranks.sharding import full, held_part, is_sharded, like, local, part_of, sizes_and_offsets

Tensor = torch.Tensor
BF16 = torch.bfloat16
_SHARED = 16  # elements: if a row has a multiple of these, up to eight ranks can share it in whole bytes of two


class StateBlocks(NamedTuple):
    """How the blocks of a parameter lie.

    A row is the last dimension. While it is shorter than a block, the dimension before it joins the row, but never the
    first one: so a shard of some rows holds whole blocks. If sharding cuts the rows themselves, as in a parameter of
    one dimension, all ranks that hold a part of a row have all its scales.

    Attributes:
        rows: the rows of this rank's part.
        shape: the shape of this rank's scales.
        folded: the first dimension that belongs to a row.
        cut: process groups of ranks that hold parts of one row: one for each mesh dimension that cuts rows.
        is_scattered: whether this rank's elements of a row have gaps between them in that row: sharding cuts the row
            along another dimension than `folded`. Such state is in 8 bits, and each read and write gathers it.
    """

    rows: Rows
    shape: tuple[int, ...]
    folded: int
    cut: tuple[Any, ...] = ()
    is_scattered: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> StateBlocks:
        """Return the blocks of a parameter, or of a tensor shaped and sharded like it."""
        shape = tuple(tensor.shape)
        whole, folded = _rows_of(shape)
        if not is_sharded(tensor):
            return _blocks_of(shape)
        _, offsets = sizes_and_offsets(tensor.shape, tensor.device_mesh, tensor.placements)
        inner = shape[folded + 1 :]
        held = tuple(local(tensor).shape)
        rows = Rows(math.prod(held[folded:]), offsets[folded] * math.prod(inner), whole.blocks) if shape else whole
        mesh, dims = tensor.device_mesh, [getattr(each, "dim", -1) for each in tensor.placements]
        cut = tuple(mesh.get_group(i) for i, dim in enumerate(dims) if dim == folded and mesh.size(i) > 1)
        scattered = any(dim > folded and mesh.size(i) > 1 for i, dim in enumerate(dims))
        return cls(rows, (*held[:folded], whole.blocks), folded, cut, scattered)

    def code_for(self, code: StateCode, shape: torch.Size, name: str | int = "") -> StateCode:
        """Return the code that a tensor gets if `code` is asked for. shape: that of the tensor over all ranks.

        If two codes share a byte, each rank must hold whole bytes of a row. So a tensor gets 8 bits if the length of
        its rows is no multiple of `_SHARED`, or if it has one dimension, which sharding may cut anywhere.

        name: the name or the position of the parameter, for the error; "" if nobody knows it.

        Raises:
            HmpxError: rows are cut so that a rank would hold a part of a byte.
        """
        length = math.prod(shape[self.folded :])
        if code.bits == 8 or not self.folded or length % _SHARED:
            return code if code.bits == 8 else EIGHT_BITS
        ranks = math.prod(dist.get_world_size(group) for group in self.cut)
        if self.is_scattered or shape[self.folded] % ranks or length // ranks % code.per_byte:
            raise HmpxError(
                f"the rows of {'a parameter' if name == '' else f'parameter {name!r}'}, {tuple(shape)}, are sharded so "
                f"that a rank would hold half a byte of its state in {code.bits} bits: give it 8 bits, by "
                f"parameters={{{name or 'its name'!r}: {{'state_dtype': '8bit'}}}}",
                key=("state_dtype",),
            )
        return code

    def of_codes(self, code: StateCode, shape: torch.Size) -> torch.Size:
        """Return the shape of the codes of a tensor, or of a rank's part of it, that has this shape."""
        row = math.prod(shape[self.folded :]) // code.per_byte
        return shape if code.per_byte == 1 else torch.Size((*shape[: self.folded], row))

    def of_all(self, tensor: Tensor) -> torch.Size:
        """Return the shape of all scales of a tensor with this layout, of which this rank may hold a part."""
        return torch.Size((*tensor.shape[: self.folded], self.rows.blocks))

    def over_ranks(self, magnitudes: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima of each block over all ranks that hold a part of its row. The arguments are this rank's."""
        both = torch.zeros(2, math.prod(self.shape), dtype=torch.int32, device=magnitudes.device)
        if magnitudes.numel():
            here = self.rows.range(0, self.rows.width * math.prod(self.shape[:-1]))
            both[0, here], both[1, here] = magnitudes, negatives
        for group in self.cut:
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
        return both[0], both[1]


@functools.lru_cache(maxsize=4096)
def _rows_of(shape: tuple[int, ...]) -> tuple[Rows, int]:
    """Return the rows of a whole tensor, and the first dimension that belongs to one."""
    folded = max(len(shape) - 1, 0)
    while folded > 1 and math.prod(shape[folded:]) < BLOCK:
        folded -= 1
    return Rows.of(math.prod(shape[folded:])), folded


@functools.lru_cache(maxsize=4096)
def _blocks_of(shape: tuple[int, ...]) -> StateBlocks:
    """Return the blocks of a tensor that is not sharded."""
    whole, folded = _rows_of(shape)
    return StateBlocks(whole, (*shape[:folded], whole.blocks), folded)


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
        tensor: the codes, uint8, contiguous: in the parameter's shape, or as `StateBlocks.of_codes` says.
        scales: one BF16 number for each block. The last dimension counts the blocks of a row; those before it are the
            parameter's, up to `StateBlocks.folded`.
    """

    def __init__(self, code: StateCode, codes: Tensor, scales: Tensor, param: Tensor) -> None:
        super().__init__(codes)
        self.code, self.scales, self._param, self._layout = code, scales, param, StateBlocks.of(param)

    @classmethod
    def new(cls, code: StateCode, param: Tensor) -> HeldCodes:
        """Allocate codes and scales for the state of a parameter, without values."""
        held, layout = local(param), StateBlocks.of(param)
        codes = torch.empty(layout.of_codes(code, held.shape), dtype=torch.uint8, device=held.device)
        scales = torch.empty(layout.shape, dtype=BF16, device=held.device)
        codes = like(param, codes, layout.of_codes(code, param.shape))
        return cls(code, codes, like(param, scales, layout.of_all(param), layout.folded), param)

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        if self._layout.cut or self._layout.is_scattered:  # scales depend on other ranks, too
            return None
        codes, scales = local(self.tensor), local(self.scales).detach()  # keeps alive what a plan writes to
        return native.StoredTensor(codes, self.code.kind, name, scales, row=self._layout.rows.width)

    def read(self, segment: Segment, out: Tensor) -> None:
        if self._layout.is_scattered:
            out.copy_(local(self.whole()))
            return
        flat = out if out.is_contiguous() else torch.empty(out.shape, dtype=torch.float32, device=out.device)
        self.code.decode(flat.view(-1), self._codes())
        if flat is not out:
            out.copy_(flat)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        layout, param = self._layout, self._param
        if layout.is_scattered or (is_sharded(param) and not is_sharded(x) and x.shape != local(param).shape):
            if x.shape != param.shape or is_sharded(x):
                x = full(like(param, local(x)))
            whole = HeldCodes.new(self.code, x)
            whole.write(Segment(segment.param, segment.name), x, name, rounding_key)
            local(self.tensor).copy_(held_part(self.tensor, whole.tensor))
            local(self.scales).copy_(held_part(self.scales, whole.scales))
            return
        x, scales = local(x).float().contiguous().view(-1), local(self.scales)
        if layout.cut:
            found = layout.over_ranks(*self.code.largest(x, layout.rows, 0))
            scales.view(-1).copy_(self.code.scales_for(*found))
        numbers = rounding_key.spans(x.numel(), segment.box), rounding_key.keys(name)
        self.code.encode(self._codes(), x, *numbers, given=bool(layout.cut))

    def _codes(self) -> BlockCodes:
        return BlockCodes(local(self.tensor).view(-1), local(self.scales), self._layout.rows)

    def whole(self) -> Tensor:
        param = self._param
        if self._layout.is_scattered:
            codes = full(self.tensor)
            whole = HeldCodes(self.code, codes, full(self.scales), codes).whole()
            return like(param, held_part(param, whole).contiguous())
        out = torch.empty(local(param).shape, dtype=torch.float32, device=local(self.tensor).device)
        self.code.decode(out.view(-1), self._codes())
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
                raise HmpxError(f"{key!r} of {of} are scales without codes of {own!r}")
            continue
        layout, own = StateBlocks.of(param), key.removeprefix(code.prefix)
        if own in state:
            raise HmpxError(
                f"{own!r} of {of} is there twice: in {code.bits} bits, as hmpx holds it between steps, and as somebody "
                "has made it since, who does not know that. If a method of the optimizer has, beside step(), name it: "
                "hmpx.attach(optimizer, methods=[...])"
            )
        if SCALES + own not in state:
            raise HmpxError(f"{own!r} of {of} is in {code.bits} bits without its scales: there is no {SCALES + own!r}")
        scales = state[SCALES + own]
        for each, value, dtype in ((key, codes, torch.uint8), (SCALES + own, scales, BF16)):
            if not isinstance(value, Tensor) or value.dtype is not dtype or not local(value).is_contiguous():
                found = {**found, each: _cast_back(value, dtype, f"{each!r} of {of}").contiguous()}
        kept = tuple(codes.shape), tuple(scales.shape), tuple(local(codes).shape), tuple(local(scales).shape)
        fitting = layout.code_for(code, param.shape, name)
        whole, here = (tuple(layout.of_codes(fitting, each.shape)) for each in (param, local(param)))
        fits = whole, tuple(layout.of_all(param)), here, layout.shape
        if fitting is not code or kept != fits:
            raise HmpxError(
                f"{own!r} of {of} is in {code.bits} bits for another shape, or sharded in another way: {kept[0]} with "
                f"scales {kept[1]}, of which this rank has {kept[2]} with {kept[3]}; the parameter's is "
                f"{fits[0]} with {fits[1]}, here {fits[2]} with {fits[3]}, in {fitting.bits} bits"
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
    """Whether another dtype holds all codes, or all scales."""
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


def is_coded(state: Any) -> TypeGuard[dict]:
    """Whether some of a parameter's state is in codes of a few bits."""
    if isinstance(state, dict):
        for key in state:  # a loop, as every step asks this of every parameter
            if code_of(key) is not None:
                return True
    return False
