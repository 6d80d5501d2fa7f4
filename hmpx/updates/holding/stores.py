"""Weight stores: how the weights of a BF16 model are held between two steps.

==========  ==========================================================  =======================
stochastic  BF16 weights, stochastic rounding on write-back             + 0 bytes a parameter
nearest     BF16 weights, round to nearest, which loses small updates   + 0
master      BF16 weights beside FP32 masters that the optimizer works   + 4
            on (Neuron's FP32ParamsCopy, NxD's use_master_weights)
split       the same masters, bit for bit: the BF16 weight is their     + 2
            upper half, an int16 the rest
split8      masters of 24 bits: an int8 is the rest, rounded            + 1
            stochastically
==========  ==========================================================  =======================

With `master`, a weight that its master does not round to was written by somebody else, and overrides the master. A
weight in halves that somebody has written keeps the rest that it had, less than half a unit in its last place.
`master` rounds ties to even; `split` and `split8` round ties away from zero (`hmpx.rounding.halves`).

To add a way, write a `Store` and name it in `WAYS`. Where it has no kernel, torch's operators move its weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import ClassVar

import torch

from hmpx.rounding import native
from hmpx.rounding.devices import kernels_for, lacks_data, shows_values
from hmpx.rounding.halves import join, join_24, read_masters, split, split_24
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
_BESIDE = attrgetter("beside")


class Store(Held):
    """The weights of one BF16 parameter.

    Attributes:
        tensor: the parameter.
        beside: the tensors kept beside the weights; another tuple where somebody has exchanged one.
        bytes_beside: bytes kept for each weight, beside the weight.
        has_masters: whether `masters` has more than the BF16 weights do.
        shows_masters: whether FP32 masters are kept as such, so that a step may work on them.
    """

    beside: tuple[Tensor, ...] = ()
    bytes_beside: ClassVar[float] = 0.0
    has_masters: ClassVar[bool] = False
    shows_masters: ClassVar[bool] = False

    def begin(self) -> None:
        """Prepare the data kept beside the weights for the weights as they are now; called first in a step."""

    def settle(self, segment: Segment, rounding_key: RoundingKey) -> None:
        """Bring the data into the form that kernels need. The segment is the whole parameter."""

    def take_masters(self, masters: Tensor) -> None:
        """Take over FP32 masters from a checkpoint. Where a master does not round to its weight, the weight counts."""

    def masters(self, segment: Segment) -> Tensor:
        """Return the FP32 masters, sharded as the parameter is. The segment is the whole parameter."""
        self.begin()
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        self.read(segment, out)
        return like(self.tensor, out) if is_sharded(self.tensor) else out

    def _part_of(self, masters: Tensor) -> Tensor:
        """Copy this rank's part of `masters`, in the layout of the weights."""
        out = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
        return out.copy_(held_part(self.tensor, masters))


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


class Master(Store):
    """BF16 weights beside FP32 masters."""

    kind = native.MASTER
    bytes_beside: ClassVar[float] = 4.0
    has_masters: ClassVar[bool] = True
    shows_masters: ClassVar[bool] = True

    def begin(self) -> None:
        masters = self.beside[0] if self.beside else None
        fitting = _copy_for(local(self.tensor), masters)
        if fitting is not masters:
            self.beside = (fitting,)

    def itself(self, segment: Segment) -> Tensor | None:
        return None if segment.by_rows else segment.of(self._here).data

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        held = local(self.tensor.detach())
        if kernels_for(held, self._here) is None:
            return None
        return native.StoredTensor(held, native.MASTER, name, self._here)

    def read(self, segment: Segment, out: Tensor) -> None:
        read_masters(segment.of(self._here), segment.of(self.tensor), out)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        master = segment.of(self._here)
        if not shows_values(master) or master.data_ptr() != x.data_ptr():  # else the step worked on it
            master.copy_(x)
        segment.of(self.tensor).copy_(x)

    def take_masters(self, masters: Tensor) -> None:
        self.beside = (self._part_of(masters),)

    @property
    def _here(self) -> Tensor:
        assert self.beside, "the step has begun"
        return self.beside[0]


class _InHalves(Store):
    """Base of stores that hold masters in two halves; the upper half is the weight itself.

    Masters from a checkpoint stay FP32 copies until the first step: the weights may be loaded after them, and the
    checkpoint may be of a run with "master", which rounds ties to even.
    """

    has_masters: ClassVar[bool] = True
    _dtype: ClassVar[torch.dtype]  # of lower halves
    kind: ClassVar[int]

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._loaded: Tensor | None = None
        self._lower: Tensor | None = None  # in row-major order, whatever the weight's memory is like

    def _split(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Write the halves of `x`."""
        raise NotImplementedError

    def _join(self, segment: Segment, out: Tensor) -> None:
        """Write the numbers with these halves to `out`."""
        raise NotImplementedError

    def begin(self) -> None:
        held = local(self.tensor)
        if self._loaded is not None:
            self._keep(_copy_for(held, self._loaded), self._lower)
        elif self._lower is None or self._lower.shape != held.shape or lacks_data(self._lower) != lacks_data(held):
            self._keep(None, torch.zeros(held.shape, dtype=self._dtype, device=held.device))
        elif self._lower.device != held.device:
            self._keep(None, self._lower.to(held.device))

    def _keep(self, loaded: Tensor | None, lower: Tensor | None) -> None:
        if loaded is not self._loaded or lower is not self._lower:
            self._loaded, self._lower = loaded, lower
            self.beside = tuple([held for held in (loaded, lower) if held is not None])

    def settle(self, segment: Segment, rounding_key: RoundingKey) -> None:
        if self._loaded is not None:
            loaded = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
            self.read(segment, loaded)
            self.write(segment, loaded, segment.name, rounding_key)

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        held = local(self.tensor.detach())
        if self._loaded is not None or self._lower is None or kernels_for(held, self._lower) is None:
            return None
        return native.StoredTensor(held, self.kind, name, self._lower)

    def read(self, segment: Segment, out: Tensor) -> None:
        if self._loaded is not None:
            read_masters(segment.of(self._loaded), segment.of(self.tensor), out)
        else:
            self._join(segment, out)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        if self._lower is None:
            self._keep(self._loaded, torch.zeros(local(self.tensor).shape, dtype=self._dtype, device=x.device))
        self._split(segment, x, name, rounding_key)
        if segment.is_last:
            self._keep(None, self._lower)

    def take_masters(self, masters: Tensor) -> None:
        self._keep(self._part_of(masters), None)

    def _halves(self, segment: Segment) -> tuple[Tensor, Tensor]:
        assert self._lower is not None, "the step has begun"
        return segment.of(self.tensor), segment.of(self._lower)


class Split(_InHalves):
    """FP32 masters, exactly: an int16 beside each weight."""

    bytes_beside: ClassVar[float] = 2.0
    _dtype, kind = torch.int16, native.SPLIT

    def _split(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        split(x, *self._halves(segment))

    def _join(self, segment: Segment, out: Tensor) -> None:
        join(*self._halves(segment), out)


class Split8(_InHalves):
    """Masters of 24 bits, rounded stochastically: an int8 beside each weight."""

    bytes_beside: ClassVar[float] = 1.0
    _dtype, kind = torch.int8, native.SPLIT8

    def _split(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        spans = rounding_key.spans(x.numel(), segment.at, segment.box)
        split_24(x, *self._halves(segment), spans, rounding_key.keys(name))

    def _join(self, segment: Segment, out: Tensor) -> None:
        join_24(*self._halves(segment), out)


def _copy_for(weights: Tensor, masters: Tensor | None) -> Tensor:
    """Return FP32 masters of these weights, on their device and in their layout; from given ones if these fit."""
    if masters is None or masters.shape != weights.shape or lacks_data(masters) != lacks_data(weights):
        return weights.detach().float()
    if masters.device != weights.device:
        return masters.to(weights.device)
    if masters.stride() == weights.stride():
        return masters
    laid = torch.empty_like(weights, dtype=torch.float32, requires_grad=False)
    return masters if laid.stride() == masters.stride() else laid.copy_(masters)


WAYS: dict[str, type[Store]] = {
    "stochastic": Stochastic,
    "nearest": Nearest,
    "master": Master,
    "split": Split,
    "split8": Split8,
}


class Stores:
    """The stores of one optimizer's parameters. Those that keep something beside the weights stay until `drop`.

    Attributes:
        are_torn: whether a step was interrupted after it had written some of the masters.
    """

    def __init__(self) -> None:
        self.are_torn = False
        self._kept: dict[Parameter, Store] = {}

    def of(self, segment: Segment) -> Store:
        """Return the store of a parameter, chosen by its `way`."""
        kind = WAYS[segment.way.weights]
        store = self._kept.get(segment.param)
        if store is None or type(store) is not kind:
            store = kind(segment.param)
            if kind.bytes_beside:
                self._kept[segment.param] = store
        return store

    def beside(self, params: Iterable[Parameter] | None = None) -> list[tuple[Tensor, ...]]:
        """Return the tensors that are kept beside the weights of these parameters, or of all."""
        stores = self._kept.values() if params is None else [self._kept[p] for p in params if p in self._kept]
        return list(map(_BESIDE, stores))

    def masters(self, segment: Segment) -> Tensor | None:
        """Return the FP32 masters of a whole parameter, sharded as it is; None where it has none."""
        return self.of(segment).masters(segment) if WAYS[segment.way.weights].has_masters else None

    def hand_over(self, gone: Segment, heir: Segment) -> int:
        """Give the masters of a parameter that left to the one in its place; return the number of elements that fit.

        They may differ in size. An element fits where both have it, with the same weight.
        """
        store = self._kept.pop(gone.param, None)
        p, before = heir.param, gone.param
        if store is None or is_sharded(p) or is_sharded(before) or p.dim() != before.dim() or p.device != before.device:
            return 0
        both = tuple([slice(min(sizes)) for sizes in zip(p.shape, before.shape, strict=True)])
        masters, fits = p.detach().float(), p.detach()[both] == before.detach()[both]
        masters[both] = torch.where(fits, store.masters(gone)[both], masters[both])
        self.of(heir).take_masters(masters)
        return int(fits.sum())

    def forget(self) -> None:
        """Drop all masters: the next step starts from the BF16 weights."""
        self._kept.clear()
        self.are_torn = False

    def drop(self, param: Parameter) -> None:
        """Drop the data kept beside the weights of one parameter."""
        self._kept.pop(param, None)
