"""The interface of a tensor held between two steps: weights, state and gradients, as a batch reads and writes them."""

from __future__ import annotations

from typing import ClassVar

import torch

from hmpx.rounding import native
from hmpx.updates.holding.rounding_key import RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Held:
    """One tensor and the data kept beside it. All methods need `torch.no_grad()`.

    Attributes:
        tensor: a gradient, weights or state; in the shape of the parameter or in one of its own.
        kind: what the C kernels call this way to hold a tensor; None if they do not know it, and torch's operators
            then move it.
    """

    kind: ClassVar[int | None] = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def itself(self, segment: Segment) -> Tensor | None:
        """The held memory itself, if a step may work on it without a copy."""
        return None

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        """How the kernels read and write a segment of contiguous tensors; None where they cannot.

        name: the hash of the name that the random numbers depend on.
        """
        return None if self.kind is None else native.StoredTensor(self.tensor.detach(), self.kind, name)

    def blocks(self, segment: Segment, x: Tensor) -> list[tuple[Segment, Tensor]]:
        """The parts in which `read` and `write` take a segment, each with its part of `x`, the step's FP32 copy."""
        return segment.blocks(x)

    def read(self, segment: Segment, out: Tensor) -> None:
        """Copy a segment into `out`, in FP32."""
        out.copy_(segment.of(self.tensor))

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Write a segment's FP32 result back. The segments of a parameter are written in order.

        name: what the random numbers depend on.
        """
        raise NotImplementedError


class Store(Held):
    """The weights of one BF16 parameter.

    Attributes:
        tensor: the parameter.
        bytes_beside: what is kept for each weight, beside the weight.
        has_masters: whether `masters` has more than the BF16 weights do.
        shows_masters: whether FP32 masters are kept as such, so that a step may work on them.
    """

    bytes_beside: ClassVar[float] = 0.0
    has_masters: ClassVar[bool] = False
    shows_masters: ClassVar[bool] = False

    def begin(self) -> None:
        """Prepare the data kept beside the weights for the weights as they are now; called first in a step."""

    def settle(self, segment: Segment, rounding_key: RoundingKey) -> None:
        """Bring the data into the form that kernels need. The segment is the whole parameter."""

    def beside(self) -> list[Tensor]:
        """The tensors kept beside the weights. While they are the same objects, nobody has exchanged masters."""
        return []

    def take_masters(self, masters: Tensor) -> None:
        """Take over FP32 masters from a checkpoint. Where a master does not round to its weight, the weight counts."""

    def masters(self, segment: Segment) -> Tensor:
        """The FP32 masters, sharded as the parameter is. The segment is the whole parameter."""
        self.begin()
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        self.read(segment, out)
        return like(self.tensor, out) if is_sharded(self.tensor) else out

    def _part_of(self, masters: Tensor) -> Tensor:
        """A copy of this rank's part of `masters`, in the layout of the weights."""
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        return out.copy_(held_part(self.tensor, masters))
