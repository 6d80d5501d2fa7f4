"""How the blocks of 8-bit state lie in a parameter, and in what a rank holds of one that is sharded."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hmpx.rounding.eight_bits import BLOCK, Rows
from hmpx.updates.ranks.sharding import is_sharded, local, sizes_and_offsets

Tensor = torch.Tensor


class StateBlocks(NamedTuple):
    """How the blocks of a parameter lie.

    A row is the last dimension. Where that is shorter than a block, it is folded with the one before it, up to the
    second, so that a shard of some rows holds whole blocks. Where the rows themselves are cut, which a sharded
    parameter of one dimension always is, all ranks that hold a part of a row have all its scales.

    Attributes:
        rows: of what this rank holds.
        shape: of the scales that it holds.
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
        """The blocks of a parameter, or of a tensor shaped and sharded like it."""
        shape = tuple(tensor.shape)
        folded = max(len(shape) - 1, 0)
        while folded > 1 and math.prod(shape[folded:]) < BLOCK:
            folded -= 1
        whole = Rows.of(math.prod(shape[folded:]))
        if not is_sharded(tensor):
            return cls(whole, (*shape[:folded], whole.blocks), folded)
        _, offsets = sizes_and_offsets(tensor)
        inner = shape[folded + 1 :]
        held = tuple(local(tensor).shape)
        rows = Rows(math.prod(held[folded:]), offsets[folded] * math.prod(inner), whole.blocks) if shape else whole
        mesh, dims = tensor.device_mesh, [getattr(each, "dim", -1) for each in tensor.placements]
        cut = tuple(mesh.get_group(i) for i, dim in enumerate(dims) if dim == folded and mesh.size(i) > 1)
        scattered = any(dim > folded and mesh.size(i) > 1 for i, dim in enumerate(dims))
        return cls(rows, (*held[:folded], whole.blocks), folded, cut, scattered)

    def of_all(self, tensor: Tensor) -> torch.Size:
        """The shape of all scales of a tensor with this layout, whatever this rank holds of them."""
        return torch.Size((*tensor.shape[: self.folded], self.rows.blocks))

    def over_ranks(self, magnitudes: Tensor, negatives: Tensor) -> tuple[Tensor, Tensor]:
        """The maxima of cut rows over all ranks that hold a part of them."""
        both = torch.zeros(2, math.prod(self.shape), dtype=torch.int32, device=magnitudes.device)
        if magnitudes.numel():
            here = self.rows.range(0, self.rows.width * math.prod(self.shape[:-1]))
            both[0, here], both[1, here] = magnitudes, negatives
        for group in self.cut:
            dist.all_reduce(both, dist.ReduceOp.MAX, group)
        return both[0], both[1]


def sharded_scales(scales: Tensor, param: Tensor, layout: StateBlocks) -> Tensor:
    """The scales of a sharded parameter as a DTensor: cut as its rows are, else whole on every rank."""
    if not is_sharded(param):
        return scales
    from torch.distributed.tensor import DTensor, Replicate

    placements = [
        each if getattr(each, "dim", layout.folded) < layout.folded else Replicate() for each in param.placements
    ]
    shape = layout.of_all(param)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(scales, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)
