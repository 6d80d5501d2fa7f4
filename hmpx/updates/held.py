"""How one tensor of a parameter is held between two steps: what a batch asks of weights, state and gradients alike."""

from __future__ import annotations

from typing import ClassVar

import torch

from hmpx.rounding import native
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local
from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Held:
    """One tensor, and what is kept beside it. All methods want `torch.no_grad()`.

    Attributes:
        tensor: a gradient, weights or state; in the shape of the parameter or in one of its own.
        kind: what the C kernels call this way to hold a tensor; None if they do not know it, and torch's operators
            then move it.
    """

    kind: ClassVar[int | None] = None

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def itself(self, segment: Segment) -> Tensor | None:
        """The memory that is held, where a step may work on that in the place of a copy."""
        return None

    def for_kernels(self, segment: Segment, name: int) -> native.Held | None:
        """How the kernels read and write a segment of contiguous tensors; None where they cannot.

        name: the hash of the name that the random numbers depend on.
        """
        return None if self.kind is None else native.Held(self.tensor.detach(), self.kind, name)

    def blocks(self, segment: Segment, x: Tensor) -> list[tuple[Segment, Tensor]]:
        """The parts in which `read` and `write` take a segment, each with its part of `x`, what a step sees of it."""
        return segment.blocks(x)

    def read(self, segment: Segment, out: Tensor) -> None:
        """Copy a segment into `out`, in FP32."""
        out.copy_(segment.of(self.tensor))

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Take what a step has left of a segment. The segments of a parameter are written in order.

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
        """Before anything else in a step: have what is kept beside the weights, for weights as they are now."""

    def settle(self, segment: Segment, rounding_key: RoundingKey) -> None:
        """Have it as the kernels want it. The segment is the whole parameter."""

    def beside(self) -> list[Tensor]:
        """The tensors that are kept beside the weights. While they are the same ones, nobody has exchanged masters."""
        return []

    def take_masters(self, masters: Tensor) -> None:
        """Take over FP32 masters from a checkpoint. Where a weight is not what its master rounds to, it counts."""

    def masters(self, segment: Segment) -> Tensor:
        """The FP32 masters, sharded as the parameter is. The segment is the whole parameter."""
        self.begin()
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        self.read(segment, out)
        return like(self.tensor, out) if is_sharded(self.tensor) else out

    def _part_of(self, masters: Tensor) -> Tensor:
        """A copy of what this rank holds of `masters`, laid as the weights are."""
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        return out.copy_(held_part(self.tensor, masters))
