"""What a step moves: tensors that are held between two steps, each of one parameter or of its state.

A `Segment` says how a parameter is held, and where the elements that this rank holds stand in the whole one. Rounding
depends on this place, and on the `RoundingKey` of the step.

torch's fused kernels read weight, gradient and state as flat arrays. So tensors that are stepped together get one
layout, that of ``torch.empty_like(parameter)``: the parameter's own if it is dense, else a dense one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.coding import CodeName
from hmpx.rounding.keys import Keys, Span
from hmpx.rounding.stochastic import Rounding, round_all
from hmpx.updates.holding.sharding import Box, local, share

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Weights = Literal["stochastic", "nearest", "master", "split", "split8"]
StateDtype = torch.dtype | CodeName


def laid_as(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy `tensor` into the layout of `torch.empty_like(like)`."""
    return torch.empty_like(like, dtype=dtype, requires_grad=False).copy_(tensor)


class Way(NamedTuple):
    """How one BF16 parameter is held between two steps. See the arguments of `hmpx.attach` with these names.

    They are the settings that may differ from parameter to parameter.
    """

    weights: Weights = "stochastic"
    state_dtype: StateDtype = torch.float32

    @property
    def is_coded(self) -> bool:
        """Whether state of the parameter's shape is held in codes."""
        return isinstance(self.state_dtype, str)


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
        """Do the pending roundings."""
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
