"""Positions, in the whole parameter, of the elements that one rank holds.

A parameter of FSDP2 or of tensor parallelism is a DTensor: this rank holds a box, cut along one dimension or more. An
optimizer that treats each element by itself can be given the box as a plain tensor; the random numbers of stochastic
rounding belong to elements of the whole parameter, so a box must know where they are. Other tensors are whole.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch

from hmpx.base.torch_private import FSDP_SUMS, FakeTensor, private
from hmpx.errors import HmpxError
from hmpx.rounding.native import PLAIN
from hmpx.rounding.shared import Span

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


class Box(NamedTuple):
    """A box of the whole parameter, row-major: rows of `width` elements that are neighbours in the whole.

    `loops` says where the rows begin, as (count, stride) of nested loops, the outermost first.
    """

    offset: int
    width: int
    loops: tuple[tuple[int, int], ...]

    @classmethod
    def cut(cls, whole: tuple[int, ...], sizes: tuple[int, ...], offsets: tuple[int, ...]) -> Box:
        """Return the box of `sizes` that begins at `offsets`, both by dimension, in a tensor of the shape `whole`."""
        strides = [1] * len(whole)
        for d in range(len(whole) - 1, 0, -1):
            strides[d - 1] = strides[d] * whole[d]
        loops: list[tuple[int, int]] = []
        width, full = 1, True  # full: all dimensions so far are there from end to end
        for d in range(len(whole) - 1, -1, -1):
            if full:
                width *= sizes[d]
            elif loops and loops[0][0] * loops[0][1] == strides[d]:
                loops[0] = (loops[0][0] * sizes[d], loops[0][1])  # one loop goes on where the other begins anew
            elif sizes[d] > 1:
                loops.insert(0, (sizes[d], strides[d]))
            full = full and sizes[d] == whole[d]
        return cls(sum(o * s for o, s in zip(offsets, strides, strict=True)), width, tuple(loops))

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Yield elements `start` to `stop` of the box, in as few pieces as two loops can walk."""
        count, stride = self.loops[-1] if self.loops else (1, 0)
        while start < stop:
            sheet, within = divmod(start, count * self.width)
            row, column = divmod(within, self.width)
            offset = self.offset + self._begin(sheet) + row * stride + column
            rows = min(count - row, (stop - start) // self.width)
            if column or not rows:
                length = width = min(self.width - column, stop - start)
            else:
                length, width = rows * self.width, self.width
            yield Span(start, start + length, offset, width, stride)
            start += length

    def _begin(self, sheet: int) -> int:
        """Return where a sheet, all rows of the last loop, begins."""
        begin = 0
        for count, stride in reversed(self.loops[:-1]):
            sheet, position = divmod(sheet, count)
            begin += position * stride
        return begin


def is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not imported here, which takes long: a DTensor's maker has
    return module is not None and isinstance(tensor, module.DTensor)


def widened() -> str:
    """Return how BF16 weights stay so under Accelerate, if it makes them FP32 as it shards them; else ""."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    asked = getattr(state, "_shared_state", {}).get("_mixed_precision") or "no"
    how = (
        f"; Accelerate under mixed_precision={asked!r} makes weights float32 as it shards them, under 'no' it does not"
    )
    return how if asked != "no" else ""


def is_shell(tensor: Tensor) -> bool:
    """Return whether this rank's part is a shell around other tensors: of a class of its own, and without memory."""
    part = local(tensor)
    if type(part) in PLAIN or isinstance(part, FakeTensor):
        return False
    try:
        part.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


def refuse_shell(param: Tensor, name: str) -> None:
    """Raise if a parameter is a shell: its numbers are in tensors that only its class knows."""
    if is_shell(param):
        raise HmpxError(
            f"parameter {name!r} ({type(param).__name__}) is a shell around other tensors, which hmpx can neither cast "
            "nor update: freeze it, and give it no dtype in a recipe; or keep it in FP32, by a recipe with FP32 "
            "weights; or make it a plain Parameter (of torchao's INT8 training: module_swap=True)"
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, a plain tensor of the same memory; needs `torch.no_grad()`."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return all of a tensor, from all ranks."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def like(param: Tensor, held: Tensor, shape: torch.Size | None = None, cut: int | None = None) -> Tensor:
    """Return a tensor that is sharded as `param` is, if that is a DTensor; `held` is this rank's part.

    Args:
        shape: of the whole tensor; None is the parameter's.
        cut: dimensions that are cut as the parameter's are; None is all. Of one that is cut further on, each rank
            holds all.
    """
    if not is_sharded(param):
        return held
    from torch.distributed.tensor import Replicate

    placements = [each if cut is None or getattr(each, "dim", -1) < cut else Replicate() for each in param.placements]
    stride = param.stride() if shape is None else torch.empty(shape, device="meta").stride()
    shape = param.shape if shape is None else shape
    return type(param).from_local(held, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)


def is_cut_from(tensor: Tensor, dim: int) -> bool:
    """Return whether ranks hold parts of a tensor along this dimension, or along one after it."""
    if not is_sharded(tensor):
        return False
    mesh = tensor.device_mesh
    return any(getattr(each, "dim", -1) >= dim and mesh.size(i) > 1 for i, each in enumerate(tensor.placements))


def held_part(param: Tensor, value: Tensor) -> Tensor:
    """Return the part of `value`, sharded in any way or not at all, for this rank's part of `param`."""
    if is_sharded(param):
        if is_sharded(value):
            if value.placements == param.placements:
                return local(value)
            return local(value.redistribute(param.device_mesh, param.placements))
        sizes, offsets = sizes_and_offsets(param.shape, param.device_mesh, param.placements)
        return value[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
    return full(value)


def share(tensor: Tensor) -> int:
    """Return about how many elements each rank holds; the same number on all ranks."""
    return tensor.numel() // tensor.device_mesh.size() if is_sharded(tensor) else tensor.numel()


def part_of(param: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is sharded as `param` is, is whole, or is this part already."""
    is_part = not is_sharded(value) and value.shape == local(param).shape
    return value if is_part else held_part(param, value)


def box_of(tensor: Tensor, name: str) -> Box | None:
    """Return the box of this rank's elements of a DTensor; None for a whole tensor."""
    if not is_sharded(tensor):
        return None
    try:
        return _box(tensor.shape, tensor.device_mesh, tensor.placements, local(tensor).shape)
    except HmpxError as error:
        raise HmpxError(f"parameter {name!r} of the shape {tuple(tensor.shape)}: {error}") from None


@functools.lru_cache(maxsize=4096)
def _box(whole: torch.Size, mesh: Any, placements: tuple, held: torch.Size) -> Box:
    from torch.distributed.tensor import Partial

    strided = private("torch.distributed.tensor.placement_types._StridedShard")

    if any(isinstance(placement, Partial) for placement in placements):
        raise HmpxError("it is a partial sum, which cannot be updated")
    sizes, offsets = sizes_and_offsets(whole, mesh, placements)
    if tuple(held) != tuple(sizes):
        raise HmpxError(f"this rank holds {tuple(held)}, the placements say {tuple(sizes)}")
    for dim in {placement.dim for placement in placements if isinstance(placement, strided)}:
        cuts = [mesh.size(i) for i, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
        if whole[dim] % math.prod(cuts) and torch.__version__ < "2.12":
            raise HmpxError(
                f"it is cut along dimension {dim} by FSDP and tensor parallelism, unevenly, and torch "
                f"{torch.__version__} does not know where this part begins; torch 2.12 does"
            )
    return Box.cut(tuple(whole), tuple(sizes), tuple(offsets))


def sizes_and_offsets(whole: torch.Size, mesh: Any, placements: tuple) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and offsets, by dimension, of this rank's part of a DTensor that is sharded so."""
    return private("torch.distributed.tensor._utils.compute_local_shape_and_global_offset")(whole, mesh, placements)


def shards_of(module: Any) -> Iterator[Any]:
    """Return what FSDP2 holds of the parameters of a module, without modules inside it."""
    state = module._get_fsdp_state()
    one = [state._fsdp_param_group] if getattr(state, "_fsdp_param_group", None) else []  # before torch 2.13
    for group in getattr(state, "_fsdp_param_groups", one):
        yield from group.fsdp_params


def whole_copies(model: torch.nn.Module) -> dict[Tensor, tuple[torch.nn.Parameter, torch.dtype | None]]:
    """Return the whole parameters that FSDP2 computes with, each with the shards that it is a copy of, which alone are
    stepped, and the dtype in which the policy wants gradients reduced; None for that of the parameter."""
    module, found = sys.modules.get("torch.distributed.fsdp"), {}
    for each in model.modules() if FSDP_SUMS.is_on() else ():
        for held in shards_of(each) if module is not None and isinstance(each, module.FSDPModule) else ():
            if (copy := getattr(held, "_unsharded_param", None)) is not None:
                found[copy] = held.sharded_param, held.mp_policy.reduce_dtype
    return found
