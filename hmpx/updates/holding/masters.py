"""Stores with masters: in FP32 beside the weights, or in two halves, the upper one being the weight.

In all, a weight that is not what its master rounds to was written by somebody else, and counts. `halves.py` has the
arithmetic of the split: its weight is the master rounded to nearest with ties away from zero. `Master` has torch's ties
to even.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from hmpx.rounding import native
from hmpx.rounding.halves import join, join_24, read_masters, split
from hmpx.rounding.kernels import kernels_for
from hmpx.updates.holding.checksums import BLOCK, block_of, checksums, clear_written
from hmpx.updates.holding.held import Store
from hmpx.updates.holding.rounding_key import RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import local

Tensor = torch.Tensor


class Master(Store):
    """BF16 weights beside FP32 masters."""

    kind = native.MASTER
    bytes_beside: ClassVar[float] = 4.0
    has_masters: ClassVar[bool] = True
    shows_masters: ClassVar[bool] = True

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._masters: Tensor | None = None

    def begin(self) -> None:
        self._masters = _copy_for(local(self.tensor), self._masters)

    def beside(self) -> list[Tensor]:
        return [] if self._masters is None else [self._masters]

    def itself(self, segment: Segment) -> Tensor | None:
        return segment.of(self._here).data if segment.order is None else None

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        held = self.tensor.detach()
        if kernels_for(held, self._here) is None:
            return None
        return native.StoredTensor(held, native.MASTER, name, self._here)

    def read(self, segment: Segment, out: Tensor) -> None:
        read_masters(segment.of(self._here), segment.of(self.tensor), out)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        master = segment.of(self._here)
        if master.data_ptr() != x.data_ptr():  # else the step was taken on the master itself
            master.copy_(x)
        segment.of(self.tensor).copy_(x)

    def take_masters(self, masters: Tensor) -> None:
        self._masters = self._part_of(masters)

    @property
    def _here(self) -> Tensor:
        assert self._masters is not None, "the step has begun"
        return self._masters


class _InHalves(Store):
    """Base of stores that hold masters in two halves; the upper half is the weight itself.

    Two halves cannot tell whether somebody wrote to a weight; checksums can. A block of weights keeps its lower halves
    if its values are those that the last step left. Else its lower halves become zero, so that the weights count.

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
        self._sums: Tensor | None = None  # of a complete parameter: none while a step is writing to it

    def _split(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        """Write the halves of `x`."""
        raise NotImplementedError

    def _join(self, segment: Segment, out: Tensor) -> None:
        """Write the numbers with these halves to `out`."""
        raise NotImplementedError

    def begin(self) -> None:
        held = local(self.tensor)
        if self._loaded is not None:
            self._loaded = _copy_for(held, self._loaded)
            return
        if self._lower is None or self._lower.shape != held.shape:
            self._lower = torch.zeros(held.shape, dtype=self._dtype, device=held.device)
            self._sums = checksums(held)
        elif self._lower.device != held.device:
            self._lower = self._lower.to(held.device)
            self._sums = None if self._sums is None else self._sums.to(held.device)

    def settle(self, segment: Segment, rounding_key: RoundingKey) -> None:
        if self._loaded is not None:
            loaded = torch.empty_like(local(self.tensor), dtype=torch.float32, requires_grad=False)
            self.read(segment, loaded)
            self.write(segment, loaded, segment.name, rounding_key)
        elif self._sums is None:
            self._sums = checksums(local(self.tensor))

    def beside(self) -> list[Tensor]:
        return [held for held in (self._loaded, self._lower, self._sums) if held is not None]

    def for_kernels(self, segment: Segment, name: int) -> native.StoredTensor | None:
        held, block = self.tensor.detach(), block_of(self.tensor)
        if self._loaded is not None or self._lower is None or self._sums is None:
            return None
        if kernels_for(held, self._lower) is None:
            return None
        if segment.offset % block or (segment.count % block and not segment.is_last):
            return None
        return native.StoredTensor(held, self.kind, name, self._lower, self._sums, block)

    def read(self, segment: Segment, out: Tensor) -> None:
        if self._loaded is not None:
            read_masters(segment.of(self._loaded), segment.of(self.tensor), out)
            return
        if segment.offset == 0 and self._lower is not None and self._sums is not None:
            clear_written(local(self.tensor), self._sums, self._lower)
        self._join(segment, out)

    def write(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        if self._lower is None:
            self._lower = torch.zeros(local(self.tensor).shape, dtype=self._dtype, device=x.device)
        self._sums = None
        self._split(segment, x, name, rounding_key)
        if segment.is_last:
            self._loaded, self._sums = None, checksums(local(self.tensor))

    def take_masters(self, masters: Tensor) -> None:
        self._loaded, self._lower, self._sums = self._part_of(masters), None, None

    def _halves(self, segment: Segment) -> tuple[Tensor, Tensor]:
        assert self._lower is not None, "the step has begun"
        return segment.of(self.tensor), segment.of(self._lower)


class Split(_InHalves):
    """FP32 masters, exactly: an int16 beside each weight."""

    bytes_beside: ClassVar[float] = 2 + 2 / BLOCK
    _dtype, kind = torch.int16, native.SPLIT

    def _split(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        split(x, *self._halves(segment))

    def _join(self, segment: Segment, out: Tensor) -> None:
        join(*self._halves(segment), out)


class Split8(_InHalves):
    """Masters of 24 bits, rounded stochastically: an int8 beside each weight."""

    bytes_beside: ClassVar[float] = 1 + 2 / BLOCK
    _dtype, kind = torch.int8, native.SPLIT8

    def _split(self, segment: Segment, x: Tensor, name: str, rounding_key: RoundingKey) -> None:
        rounding_key.split_into(*self._halves(segment), x, name, segment.at, segment.box)

    def _join(self, segment: Segment, out: Tensor) -> None:
        join_24(*self._halves(segment), out)


def _copy_for(weights: Tensor, masters: Tensor | None) -> Tensor:
    """FP32 masters of these weights, from given ones as far as they fit, on the weights' device and in their layout."""
    if masters is None or masters.shape != weights.shape:
        return weights.detach().float()
    if masters.device != weights.device:
        return masters.to(weights.device)
    if masters.stride() == weights.stride():
        return masters
    laid = torch.empty_like(weights, dtype=torch.float32, requires_grad=False)
    return masters if laid.stride() == masters.stride() else laid.copy_(masters)
