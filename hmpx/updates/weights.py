"""Weight stores: how the weights of a BF16 model are held between two steps.

==========  ==========================================================  =======================
stochastic  BF16 weights, stochastic rounding on write-back             + 0 bytes a parameter
nearest     BF16 weights, round to nearest, which loses small updates   + 0
master      BF16 weights beside FP32 masters that the optimizer works   + 4
            on (Neuron's FP32ParamsCopy, NxD's use_master_weights)
split       the same masters, bit for bit: the BF16 weight is their     + 2
            upper half, an int16 the rest (2.06 with `checksums.py`)
split8      masters of 24 bits: an int8 is the rest, rounded            + 1
            stochastically (1.06 with `checksums.py`)
==========  ==========================================================  =======================

To add a store, write a class with the methods of `WeightStore` (and of `MasterStore`, if it holds masters) and name it
in `WAYS`.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch

from hmpx.rounding import native
from hmpx.rounding.keys import name_id
from hmpx.updates.masters import Master, Split, Split8
from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class StepStore(Protocol):
    """The weights of one optimizer's BF16 parameters, as a step needs them. All methods want `torch.no_grad()`."""

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        """Copy the weights of each segment into the FP32 tensor at the same place of `outs`."""

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        """Make the FP32 tensor `x` the weights of a segment. Segments of a parameter are written in order."""

    def held(self, param: Parameter) -> list[Tensor]:
        """The tensors that are kept beside the weights of one parameter, each of its shape."""

    def kept(self, segment: Segment) -> native.Held | None:
        """How kernels of ours read and write the weights of a contiguous parameter in slices.

        None where the store has to look first: at what was loaded, say.
        """

    def begin(self, segment: Segment, rounding_key: RoundingKey) -> None:
        """Make what is to be kept beside the weights of a whole parameter, and look at what is: `kept` has it then."""

    def all_held(self) -> list[Tensor]:
        """The tensors that are kept beside all weights: while they are the same ones, `kept` says the same."""


class WeightStore(StepStore, Protocol):
    """The weights of one optimizer's BF16 parameters.

    Attributes:
        bytes_beside: what is held for each weight, beside the weight.
        has_masters: whether this is a `MasterStore`.
    """

    bytes_beside: ClassVar[float]
    has_masters: ClassVar[bool]

    def drop(self, param: Parameter) -> None:
        """Forget what is kept beside the weights of one parameter."""


class MasterStore(WeightStore, Protocol):
    """A store of FP32 masters."""

    def masters(self, segment: Segment) -> Tensor:
        """The FP32 masters of a whole parameter, sharded as the parameter is."""

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        """Take over FP32 masters from a checkpoint. Where a weight is not what its master rounds to, it counts."""

    def forget(self) -> None:
        """Drop all masters: the next step starts from the BF16 weights."""


class _Bare:
    """What stores have in common that keep nothing beside the BF16 weights."""

    bytes_beside: ClassVar[float] = 0.0
    has_masters: ClassVar[bool] = False
    _kind: ClassVar[int]  # of `native_held.c`

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        torch._foreach_copy_(outs, [segment.of(segment.param) for segment in segments])

    def held(self, param: Parameter) -> list[Tensor]:
        return []

    def kept(self, segment: Segment) -> native.Held:
        return native.Held(segment.param.detach(), self._kind, name_id(segment.name))

    def begin(self, segment: Segment, rounding_key: RoundingKey) -> None:
        pass

    def all_held(self) -> list[Tensor]:
        return []

    def drop(self, param: Parameter) -> None:
        pass


class Stochastic(_Bare):
    """BF16 weights, written by stochastic rounding: what is below BF16's precision is kept in the mean."""

    _kind = native.BF16

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        rounding_key.round_into(segment.of(segment.param), x, segment.name, segment.at, segment.box)


class Nearest(_Bare):
    """BF16 weights, rounded to nearest, as a plain torch step leaves them; the step itself is computed in FP32."""

    _kind = native.NEAREST

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        segment.of(segment.param).copy_(x)


WAYS: dict[str, type[WeightStore]] = {
    "stochastic": Stochastic,
    "nearest": Nearest,
    "master": Master,
    "split": Split,
    "split8": Split8,
}
