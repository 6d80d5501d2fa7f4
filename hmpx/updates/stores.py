"""The weight stores of one optimizer: one, or where rules hold some parameters in other ways, one for each way."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeGuard

import torch

from hmpx.rounding import native
from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment
from hmpx.updates.weights import WAYS, MasterStore, StepStore, WeightStore

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Stores:
    """The stores, by their names in `WAYS`.

    joined: all of them as one, for a step.
    """

    def __init__(self, ways: Collection[str]) -> None:
        self._stores: dict[str, WeightStore] = {weights: WAYS[weights]() for weights in ways}
        self.joined: StepStore = _Several(self._stores) if len(ways) > 1 else next(iter(self._stores.values()))

    def masters(self, segment: Segment) -> Tensor | None:
        """The FP32 masters of a whole parameter, sharded as the parameter is; None where it has none."""
        store = self._stores[segment.way.weights]
        return store.masters(segment) if _has_masters(store) else None

    def set_masters(self, weights: str, param: Parameter, masters: Tensor) -> bool:
        """Take over masters from a checkpoint, for a parameter that is held so; whether it is held with masters."""
        store = self._stores[weights]
        if _has_masters(store):
            store.set_masters(param, masters)
        return store.has_masters

    def forget(self) -> None:
        """Drop all masters: the next step starts from the BF16 weights."""
        for store in self._stores.values():
            if _has_masters(store):
                store.forget()

    def drop(self, param: Parameter) -> None:
        """Forget what is kept beside the weights of one parameter."""
        for store in self._stores.values():
            store.drop(param)


def _has_masters(store: WeightStore) -> TypeGuard[MasterStore]:
    return store.has_masters


class _Several:
    """The weights of parameters that are held in several ways: each is left to the store of its own way."""

    def __init__(self, stores: Mapping[str, WeightStore]) -> None:
        self._stores = stores

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        parts: dict[str, tuple[list[Segment], list[Tensor]]] = {}
        for segment, out in zip(segments, outs, strict=True):
            of_way = parts.setdefault(segment.way.weights, ([], []))
            of_way[0].append(segment)
            of_way[1].append(out)
        for weights, part in parts.items():
            self._stores[weights].read_all(*part)

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        self._stores[segment.way.weights].write(segment, x, rounding_key)

    def held(self, param: Parameter) -> list[Tensor]:
        return [tensor for store in self._stores.values() for tensor in store.held(param)]

    def kept(self, segment: Segment) -> native.Held | None:
        return self._stores[segment.way.weights].kept(segment)

    def begin(self, segment: Segment, rounding_key: RoundingKey) -> None:
        self._stores[segment.way.weights].begin(segment, rounding_key)

    def all_held(self) -> list[Tensor]:
        return [tensor for store in self._stores.values() for tensor in store.all_held()]
