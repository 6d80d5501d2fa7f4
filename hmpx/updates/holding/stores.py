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

To add a way, write a `Store` and name it in `WAYS`. Where it has no kernel, torch's operators move its weights.
"""

from __future__ import annotations

import torch

from hmpx.rounding import native
from hmpx.updates.holding.held import Store
from hmpx.updates.holding.masters import Master, Split, Split8
from hmpx.updates.holding.rounding_key import RoundingKey
from hmpx.updates.holding.segment import Segment

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Stochastic(Store):
    """BF16 weights, written by stochastic rounding: updates below BF16's precision are kept on average."""

    kind = native.BF16

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        rounding_key.round_into(segment.of(self.tensor), x, name, segment.at, segment.box)


class Nearest(Store):
    """BF16 weights, rounded to nearest, as a plain torch step leaves them; the step itself is computed in FP32."""

    kind = native.NEAREST

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        segment.of(self.tensor).copy_(x)


WAYS: dict[str, type[Store]] = {
    "stochastic": Stochastic,
    "nearest": Nearest,
    "master": Master,
    "split": Split,
    "split8": Split8,
}


class Stores:
    """The stores of one optimizer's parameters. Those that keep something beside the weights stay until `drop`."""

    def __init__(self) -> None:
        self._kept: dict[Parameter, Store] = {}

    def of(self, segment: Segment) -> Store:
        """The store of a parameter, chosen by its `way`."""
        kind = WAYS[segment.way.weights]
        store = self._kept.get(segment.param)
        if store is None or type(store) is not kind:
            store = kind(segment.param)
            if kind.bytes_beside:
                self._kept[segment.param] = store
        return store

    def beside(self, *params: Parameter) -> list[Tensor]:
        """The tensors that are kept beside the weights of these parameters, or of all."""
        stores = [self._kept[p] for p in params if p in self._kept] if params else self._kept.values()
        return [tensor for store in stores for tensor in store.beside()]

    def masters(self, segment: Segment) -> Tensor | None:
        """The FP32 masters of a whole parameter, sharded as the parameter is; None where it has none."""
        return self.of(segment).masters(segment) if WAYS[segment.way.weights].has_masters else None

    def forget(self) -> None:
        """Drop all masters: the next step starts from the BF16 weights."""
        self._kept.clear()

    def drop(self, param: Parameter) -> None:
        """Drop the data kept beside the weights of one parameter."""
        self._kept.pop(param, None)
