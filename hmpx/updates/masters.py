"""Stores with masters: FP32 beside the weights, or in two halves of which the weight is one.

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
from hmpx.rounding.keys import name_id
from hmpx.updates.checksums import BLOCK, block_of, checksums, clear_written
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local
from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class _Copies:
    """What stores of masters have in common: FP32 copies of parameters, and reading masters from them."""

    has_masters: ClassVar[bool] = True

    def __init__(self) -> None:
        self._masters: dict[Parameter, Tensor] = {}

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        for segment, out in zip(segments, outs, strict=True):
            self._read(segment, out)

    def _read(self, segment: Segment, out: Tensor) -> None:
        """From the copy, which is made first where there is none that fits."""
        self._copy(segment)
        read_masters(segment.of(self._masters[segment.param]), segment.of(segment.param), out)

    def _copy(self, segment: Segment) -> None:
        """Have a copy, on the weight's device."""
        masters, held = self._masters.get(segment.param), local(segment.param)
        if masters is None or masters.shape != held.shape:
            self._masters[segment.param] = held.float()
        elif masters.device != held.device:
            self._masters[segment.param] = masters.to(held.device)

    def masters(self, segment: Segment) -> Tensor:
        out = torch.empty_like(local(segment.param), dtype=torch.float32)
        self.read_all([segment], [out])
        return like(segment.param, out) if is_sharded(segment.param) else out

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        self._masters[param] = torch.empty_like(local(param), dtype=torch.float32).copy_(held_part(param, masters))


class Master(_Copies):
    """BF16 weights beside FP32 masters."""

    bytes_beside: ClassVar[float] = 4.0

    def begin(self, segment: Segment, rounding_key: RoundingKey) -> None:
        self._copy(segment)
        masters, held = self._masters[segment.param], local(segment.param)
        if masters.stride() != held.stride():  # the weight has been laid otherwise
            self._masters[segment.param] = torch.empty_like(held, dtype=torch.float32).copy_(masters)

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        master = segment.of(self._masters[segment.param])
        if master.data_ptr() != x.data_ptr():  # else the step was taken on the master itself
            master.copy_(x)
        segment.of(segment.param).copy_(x)

    def held(self, param: Parameter) -> list[Tensor]:
        return [self._masters[param]] if param in self._masters else []

    def kept(self, segment: Segment) -> native.Held | None:
        held, masters = segment.param.detach(), self._masters.get(segment.param)
        if masters is None or kernels_for(held, masters) is None:
            return None
        return native.Held(held, native.MASTER, name_id(segment.name), masters)

    def all_held(self) -> list[Tensor]:
        return list(self._masters.values())

    def drop(self, param: Parameter) -> None:
        self._masters.pop(param, None)

    def forget(self) -> None:
        self._masters.clear()


class _InHalves(_Copies):
    """What stores have in common that hold masters in two halves: the upper one is the weight itself.

    Two halves cannot tell whether somebody wrote to a weight; checksums can. A block of weights keeps its lower halves
    if its values are those that the last step left. Else its lower halves become zero, so that the weights count.

    Masters from a checkpoint stay FP32 copies until the first step: the weights may be loaded after them, and the
    checkpoint may be of a run with "master", which rounds ties to even.
    """

    _dtype: ClassVar[torch.dtype]  # of lower halves
    _kind: ClassVar[int]  # of `native_held.c`

    def _split(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        """Write the halves of `x`."""
        raise NotImplementedError

    def _join(self, segment: Segment, out: Tensor) -> None:
        """Write the numbers with these halves to `out`."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self._lower: dict[Parameter, Tensor] = {}  # in row-major order, whatever the weight's memory is like
        self._checksums: dict[Parameter, Tensor] = {}  # of complete parameters: none while a step is writing to one

    def _read(self, segment: Segment, out: Tensor) -> None:
        if segment.param in self._masters:
            super()._read(segment, out)
            return
        if segment.offset == 0:
            self._update_lower(segment.param)
        if segment.param in self._lower:
            self._join(segment, out)
        else:
            out.copy_(segment.of(segment.param))

    def _update_lower(self, param: Parameter) -> None:
        """Drop or clear lower halves that do not belong to the weights any more."""
        held, lower, before = local(param), self._lower.get(param), self._checksums.get(param)
        if lower is not None and lower.shape != held.shape:
            self._lower.pop(param)
            return
        if lower is not None and lower.device != held.device:
            self._lower[param] = lower = lower.to(held.device)
        if lower is not None and before is not None:
            clear_written(held, before.to(held.device), lower)

    def begin(self, segment: Segment, rounding_key: RoundingKey) -> None:
        if self.kept(segment) is not None:  # the kernels look at checksums themselves, and make no GPU wait for that
            return
        held = local(segment.param)
        if segment.param in self._masters:
            loaded = torch.empty_like(held, dtype=torch.float32)
            self._read(segment, loaded)
            self.write(segment, loaded, rounding_key)
            return
        self._update_lower(segment.param)
        if segment.param not in self._lower:
            self._begin_lower(segment.param)
        sums = self._checksums.get(segment.param)
        if sums is None or sums.device != held.device:
            self._checksums[segment.param] = checksums(held)

    def _begin_lower(self, param: Parameter) -> None:
        held = local(param)
        self._lower[param] = torch.zeros(held.shape, dtype=self._dtype, device=held.device)
        self._checksums.pop(param, None)

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        held = local(segment.param)
        if segment.param not in self._lower:
            self._begin_lower(segment.param)
        self._checksums.pop(segment.param, None)
        self._split(segment, x, rounding_key)
        if segment.is_last:
            self._masters.pop(segment.param, None)
            self._checksums[segment.param] = checksums(held)

    def held(self, param: Parameter) -> list[Tensor]:
        return [held[param] for held in (self._masters, self._lower) if param in held]

    def kept(self, segment: Segment) -> native.Held | None:
        held, lower = segment.param.detach(), self._lower.get(segment.param)
        sums, block = self._checksums.get(segment.param), block_of(held)
        if lower is None or sums is None or segment.param in self._masters or sums.device != held.device:
            return None
        if kernels_for(held, lower) is None:
            return None
        if segment.offset % block or (segment.count % block and not segment.is_last):
            return None
        return native.Held(held, self._kind, name_id(segment.name), lower, sums, block)

    def all_held(self) -> list[Tensor]:
        return [*self._masters.values(), *self._lower.values(), *self._checksums.values()]

    def drop(self, param: Parameter) -> None:
        for held in (self._masters, self._lower, self._checksums):
            held.pop(param, None)

    def forget(self) -> None:
        for held in (self._masters, self._lower, self._checksums):
            held.clear()


class Split(_InHalves):
    """FP32 masters, exactly: an int16 beside each weight."""

    bytes_beside: ClassVar[float] = 2 + 2 / BLOCK
    _dtype, _kind = torch.int16, native.SPLIT

    def _split(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        split(x, segment.of(segment.param), segment.of(self._lower[segment.param]))

    def _join(self, segment: Segment, out: Tensor) -> None:
        join(segment.of(segment.param), segment.of(self._lower[segment.param]), out)


class Split8(_InHalves):
    """Masters of 24 bits, rounded stochastically: an int8 beside each weight."""

    bytes_beside: ClassVar[float] = 1 + 2 / BLOCK
    _dtype, _kind = torch.int8, native.SPLIT8

    def _split(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        halves = segment.of(segment.param), segment.of(self._lower[segment.param])
        rounding_key.split_into(*halves, x, segment.name, segment.at, segment.box)

    def _join(self, segment: Segment, out: Tensor) -> None:
        join_24(segment.of(segment.param), segment.of(self._lower[segment.param]), out)
