"""How the codes and scales of a parameter's state lie, on one rank or on many."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hmpx.errors import HmpxError
from hmpx.rounding.blocks import BLOCK, Rows
from hmpx.rounding.coding import StateCode
from hmpx.rounding.eight_bits import EIGHT_BITS
from hmpx.updates.ranks.sharding import is_sharded, local, sizes_and_offsets

Tensor = torch.Tensor
_SHARED = 16  # elements: rows that up to eight ranks share, two elements in a byte


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
        is_scattered: whether this rank's elements of a row have gaps between them in that row: the row is cut along
            another dimension than `folded`. Such state is gathered to be read and written, and is in 8 bits.
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

    def code_for(self, code: StateCode, shape: torch.Size, name: str | int = "") -> StateCode:
        """Return the code of a tensor of this shape, of all ranks, where `code` is asked for.

        Codes that share bytes want rows of whole bytes on any ranks. So 8 bits take the place of fewer for rows whose
        length is no multiple of `_SHARED`, and for one dimension, which is cut anyhow.

        name: of the parameter, or its position, for the error; "" where nobody knows.

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
        """Return the shape of the codes of a tensor, or of a rank's part, of this shape."""
        row = math.prod(shape[self.folded :]) // code.per_byte
        return shape if code.per_byte == 1 else torch.Size((*shape[: self.folded], row))

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


def sharded_as(part: Tensor, param: Tensor, shape: torch.Size, cut: int) -> Tensor:
    """Make what this rank holds of a tensor of this shape a DTensor, if the parameter is one.

    cut: dimensions that are cut as the parameter's are. Of one that is cut further on, each rank holds all.
    """
    if not is_sharded(param):
        return part
    from torch.distributed.tensor import DTensor, Replicate

    placements = [each if getattr(each, "dim", -1) < cut else Replicate() for each in param.placements]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, param.device_mesh, placements, run_check=False, shape=shape, stride=stride)
