"""Holders of one state tensor between two steps: as it is, or in 8 bits.

A tensor in 8 bits stands in the state of its parameter as two tensors, under names that no optimizer knows: a step that
hmpx does not see fails, and does not take codes for numbers. Both are plain tensors, or DTensors where the parameter is
one, so that whatever saves, moves or shards optimizer state does so with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist

from hmpx.errors import HmpxError
from hmpx.rounding import native
from hmpx.rounding.blocks import BLOCK, BlockCodes, Rows
from hmpx.rounding.eight_bits import decode, encode, largest, scales_for
from hmpx.updates.holding.held import Held, RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local, sizes_and_offsets

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


class StateBlocks(NamedTuple):
    """How the blocks of a parameter lie.

    A row is the last dimension. Where that is shorter than a block, it is folded with the one before it, up to the
    second, so that a shard of some rows holds whole blocks. Where the rows themselves are cut, which a sharded
    parameter of one dimension always is, all ranks that hold a part of a row have all its scales.

    Attributes:
        rows: the rows of this rank's part.
        shape: the shape of this rank's scales.
        folded: the first dimension that belongs to a row.
        cut: the ranks that hold parts of one row, a group for each dimension of the mesh along which rows are cut.
        is_scattered: whether what this rank holds of a row does not follow one another in it, as the row is cut along
            another dimension than the first of those that are folded. Such state is gathered to be read and written.
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
        folded = max(len(shape) - 1, 0)
        while folded > 1 and math.prod(shape[folded:]) < BLOCK:
            folded -= 1
        whole = Rows.of(math.prod(shape[folded:]))
        if not is_sharded(tensor):
            return cls(whole, (*shape[:folded], whole.blocks), folded)
        _, offsets = sizes_and_offsets(tensor.shape, tensor.device_mesh, tensor.placements)
        inner = shape[folded + 1 :]
        held = tuple(local(tensor).shape)
        rows = Rows(math.prod(held[folded:]), offsets[folded] * math.prod(inner), whole.blocks) if shape else whole
        mesh, dims = tensor.device_mesh, [getattr(each, "dim", -1) for each in tensor.placements]
        cut = tuple(mesh.get_group(i) for i, dim in enumerate(dims) if dim == folded and mesh.size(i) > 1)
        scattered = any(dim > folded and mesh.size(i) > 1 for i, dim in enumerate(dims))
        return cls(rows, (*held[:folded], whole.blocks), folded, cut, scattered)

    def of_all(self, tensor: Tensor) -> torch.Size:
        """Return the shape of all scales of a tensor with this layout, whatever this rank holds of them."""
        return torch.Size((*tensor.shape[: self.folded], self.rows.blocks))

    def over_ranks(self, magnitudes: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima of cut rows over all ranks that hold a part of them."""
        both = torch.zeros(2, math.prod(self.shape), dtype=torch.int32, device=magnitudes.device)
        if magnitudes.numel():
            here = self.rows.range(0, self.rows.width * math.prod(self.shape[:-1]))
            both[0, here], both[1, here] = magnitudes, negatives
        for group in self.cut:
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
        return both[0], both[1]


def sharded_scales(scales: Tensor, param: Tensor, layout: StateBlocks) -> Tensor:
    """Make the scales of a sharded parameter a DTensor: cut as its rows are, else whole on every rank."""
    if not is_sharded(param):
        return scales
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        each if getattr(each, "dim", layout.folded) < layout.folded else Replicate() for each in param.placements
    ]
    shape = layout.of_all(param)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(scales, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)


BF16 = torch.bfloat16

CODES, SCALES = "hmpx_codes_", "hmpx_scales_"  # before the optimizer's own name of a state tensor


class HeldState(Held):
    """A state tensor of a parameter's shape."""

    def whole(self) -> Tensor:
        """Return all of it, in a dtype that holds it exactly; sharded as the parameter is."""
        return self.tensor

    def entries(self, key: str) -> dict[str, Tensor]:
        """Return the entries in the parameter's state for the tensor that the optimizer calls `key`."""
        return {key: self.tensor}


class HeldTensor(HeldState):
    """An FP32 tensor, or a BF16 one that is written by stochastic rounding."""

    def itself(self, segment: Segment) -> Tensor | None:
        return None if self.tensor.dtype is BF16 else segment.of(self.tensor)

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        return native.StoredTensor(self.tensor, native.BF16, name) if self.tensor.dtype is BF16 else None

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        x, held = held_part(segment.param, x) if segment.is_gathered else local(x), segment.of(self.tensor)
        if held.dtype is x.dtype:
            held.copy_(x)
        else:
            rounding_key.round_into(held, x, name, segment.at, segment.box)


class HeldCodes(HeldState):
    """A tensor in 8 bits; `hmpx.rounding.eight_bits` has the code.

    Attributes:
        tensor: the codes, uint8, of the parameter's shape, contiguous.
        scales: one BF16 number for each block. Of a parameter of n dimensions, the first k are those of the parameter,
            and the last one counts the blocks of a row; see `StateBlocks`.
    """

    kind = native.CODED

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        super().__init__(codes)
        self.scales = scales

    @classmethod
    def new(cls, param: Tensor) -> HeldCodes:
        """Uninitialised memory for the state of a parameter."""
        held, layout = local(param), StateBlocks.of(param)
        codes = torch.empty(held.shape, dtype=torch.uint8, device=held.device)
        scales = torch.empty(layout.shape, dtype=BF16, device=held.device)
        return cls(like(param, codes) if is_sharded(param) else codes, sharded_scales(scales, param, layout))

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        row = StateBlocks.of(self.tensor).rows.width
        return native.StoredTensor(self.tensor, native.CODED, name, self.scales, row=row)

    def read(self, segment: Segment, out: Tensor) -> None:
        layout = StateBlocks.of(self.tensor)
        if layout.is_scattered:  # a part is all that this rank holds
            out.copy_(local(self.whole()).reshape(out.shape))
            return
        codes = self._codes(segment)
        flat = out if out.is_contiguous() else torch.empty_like(codes.codes, dtype=torch.float32)
        decode(flat.view(-1), codes)
        if flat is not out:
            out.copy_(flat.view(out.shape))

    def write(self, segment: Segment, value: Tensor, name: str, rounding_key: RoundingKey) -> None:
        layout = StateBlocks.of(self.tensor)
        if layout.is_scattered or (segment.is_gathered and not is_sharded(value)):
            if value.shape != self.tensor.shape or is_sharded(value):
                value = like(cast("DTensor", self.tensor), local(value).view(local(self.tensor).shape)).full_tensor()
            whole = HeldCodes.new(value)
            whole.write(Segment(segment.param, segment.name), value, name, rounding_key)
            local(self.tensor).copy_(held_part(self.tensor, whole.tensor))
            local(self.scales).copy_(held_part(self.scales, whole.scales))
            return
        x, scales = local(value).float().contiguous().view(-1), local(self.scales)
        if layout.cut:
            scales.view(-1).copy_(scales_for(*layout.over_ranks(*largest(x, layout.rows, 0))))
        numbers = rounding_key.spans(x.numel(), segment.at, segment.box), rounding_key.keys(name)
        encode(self._codes(segment), x, *numbers, given=bool(layout.cut))

    def _codes(self, segment: Segment | None = None) -> BlockCodes:
        """Return the codes of a segment, or of all that this rank holds."""
        codes, rows = local(self.tensor).view(-1), StateBlocks.of(self.tensor).rows
        if segment is not None and segment.start is not None:
            return BlockCodes(codes[segment.start : segment.stop], local(self.scales), rows, segment.start)
        return BlockCodes(codes, local(self.scales), rows)

    def whole(self) -> Tensor:
        if StateBlocks.of(self.tensor).is_scattered:
            codes, scales = cast("DTensor", self.tensor), cast("DTensor", self.scales)
            whole = HeldCodes(codes.full_tensor(), scales.full_tensor()).whole()
            return like(codes, held_part(codes, whole).contiguous())
        out = torch.empty_like(local(self.tensor), dtype=torch.float32)
        decode(out.view(-1), self._codes())
        return like(self.tensor, out) if is_sharded(self.tensor) else out

    def entries(self, key: str) -> dict[str, Tensor]:
        return {CODES + key: self.tensor, SCALES + key: self.scales}


def check_codes(state: Mapping[str, Any], param: Tensor, name: str | int = "") -> None:
    """Check that 8-bit state fits its parameter, since it may be that of another one.

    name: of the parameter, or its position, for the error; "" where nobody knows.

    Raises:
        HmpxError: codes or scales have not the shapes that the parameter's have, or a rank holds another part of them.
    """
    for key, codes in state.items():
        if not isinstance(key, str) or not key.startswith(CODES):
            continue
        layout, own = StateBlocks.of(param), key.removeprefix(CODES)
        scales, of = state.get(SCALES + own), "a parameter" if name == "" else f"parameter {name!r}"
        if scales is None:
            raise HmpxError(f"{own!r} of {of} is in 8 bits without its scales: there is no {SCALES + own!r}")
        kept = tuple(codes.shape), tuple(scales.shape), tuple(local(codes).shape), tuple(local(scales).shape)
        fits = tuple(param.shape), tuple(layout.of_all(param)), tuple(local(param).shape), layout.shape
        if kept != fits:
            raise HmpxError(
                f"{own!r} of {of} is in 8 bits for another shape, or sharded in another way: {kept[0]} with scales "
                f"{kept[1]}, of which this rank has {kept[2]} with {kept[3]}; the parameter's is {fits[0]} with "
                f"{fits[1]}, here {fits[2]} with {fits[3]}"
            )


def held(state: Mapping[str, Any], param: Tensor, name: str | int = "") -> dict[str, Any]:
    """Return the state of a parameter by the optimizer's own keys. Tensors of the parameter's shape become `HeldState`.

    Raises:
        HmpxError: as `check_codes`.
    """
    check_codes(state, param, name)
    found: dict[str, Any] = {}
    for key, value in state.items():
        name = key if isinstance(key, str) else ""
        if name.startswith(CODES):
            # A load that hmpx does not see casts the codes to the parameter's dtype, which holds them exactly.
            codes = value if value.dtype is torch.uint8 else value.to(torch.uint8)
            own = name.removeprefix(CODES)
            found[own] = HeldCodes(codes, state[SCALES + own].to(BF16))
        elif not name.startswith(SCALES):
            is_held = isinstance(value, Tensor) and value.shape == param.shape and value.layout is torch.strided
            found[key] = HeldTensor(value) if is_held else value
    return found


def entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries in the optimizer's state: the inverse of `held`."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        found.update(value.entries(key) if isinstance(value, HeldState) else {key: value})
    return found


def by_own_keys(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the state of a parameter by the optimizer's own keys; of 8-bit tensors, the codes."""
    if not is_coded(state):
        return state
    return {key.removeprefix(CODES): value for key, value in state.items() if not key.startswith(SCALES)}


def is_coded(state: Any) -> TypeGuard[dict]:
    """Whether some of a parameter's state is in 8 bits."""
    if isinstance(state, dict):
        for key in state:  # a loop, as every step asks this of every parameter
            if isinstance(key, str) and key.startswith(CODES):
                return True
    return False
