"""Ways to hold the weights of a BF16 model between two steps.

Each knows two things about a segment of a parameter: how to read it in FP32 and how to write it back, both under
`torch.no_grad()`.

==========  ==========================================================  =======================
stochastic  BF16 weights, stochastic rounding on write-back             + 0 bytes a parameter
nearest     BF16 weights, round to nearest, which loses small updates   + 0
master      BF16 weights beside FP32 masters that the optimizer works   + 4
            on (Neuron's FP32ParamsCopy, NxD's use_master_weights)
split       the same masters, bit for bit: the BF16 weight is their     + 2
            upper half, an int16 the rest (2.06 with `checksums.py`)
==========  ==========================================================  =======================

`halves.py` has the split. Its weight is the master rounded to nearest with ties away from zero; `master` has torch's
ties to even.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hmpx.rounding.halves import join, read_masters, split
from hmpx.rounding.stochastic import round_into
from hmpx.updates.checksums import BLOCK, checksums, clear_written
from hmpx.updates.layout import Order, boxes, lies_flat, unfolded
from hmpx.updates.ranks.sharding import Box, held_part, is_sharded, like, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Segment:
    """A parameter, or the elements `start` ... `stop - 1` of it, and how the optimizer is shown them.

    A whole parameter is shown in its shape, a part flat. Elements are counted in row-major order, or, where `order` is
    given, with the dimensions in that order: what is not contiguous is stepped in the order of memory. Of a sharded
    parameter it is those that this rank holds, and `box` is where they stand. `index` cuts out a block of such a part.
    """

    param: Parameter
    name: str
    start: int | None = None
    stop: int | None = None
    order: Order | None = None
    index: tuple[slice, ...] | None = None
    box: Box | None = None
    at: int = 0  # where the block begins in the box, or in a parameter that is whole
    overlaps: Parameter | None = None  # another one that shares elements of memory

    def of(self, tensor: Tensor) -> Tensor:
        """This segment of a tensor shaped like the parameter, as a view; under `torch.no_grad()`.

        Of a part that has an order, see `spread`.
        """
        tensor = local(tensor)
        if self.start is None:
            return tensor
        return tensor[self.index] if self.index is not None else tensor.view(-1)[self.start : self.stop]

    def flat(self, tensor: Tensor) -> Tensor | None:
        """This part of a tensor as a flat view, where it lies flat."""
        if self.order is None:
            return self.of(tensor)
        tensor = local(tensor)
        lies = lies_flat(tensor, self.order)
        return tensor.permute(self.order).reshape(-1)[self.start : self.stop] if lies else None

    def parts(self, size: int, order: Order | None) -> Iterator[Segment]:
        """A whole parameter in parts of at most `size` elements."""
        for start in range(0, self.count or 1, size):  # a rank may hold nothing, and has state all the same
            yield replace(self, start=start, stop=min(start + size, self.count), order=order, at=start)

    def spread(self, shown: Tensor) -> list[tuple[Segment, Tensor]]:
        """Runs that can be cut out of any tensor shaped like the parameter, each with its place in `shown`."""
        if self.order is None:
            return [(self, shown)]
        spread, begin, sizes = [], 0, local(self.param).shape
        for index in boxes(sizes, self.order, self.start, self.stop):
            block = tuple(i.stop - i.start for i in index)
            end = begin + math.prod(block)
            segment = replace(self, start=self.start + begin, stop=self.start + end, order=None, index=index)
            if self.order == tuple(range(len(sizes))):
                segment = replace(segment, at=segment.start)
            else:
                segment = replace(segment, at=0, box=Box.cut(tuple(sizes), block, tuple(i.start for i in index)))
            spread.append((segment, unfolded(shown[begin:end], block, self.order)))
            begin = end
        return spread

    def written(self) -> None:
        """Tell autograd: a sharded parameter does not notice what happens to the tensor that it holds."""
        if self.box is not None:
            torch.autograd.graph.increment_version(self.param)

    @property
    def is_gathered(self) -> bool:
        """Whether the optimizer is shown more than this rank holds."""
        return self.start is None and self.box is not None

    @property
    def offset(self) -> int:
        return self.start or 0

    @property
    def count(self) -> int:
        return local(self.param).numel() if self.start is None else self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.offset + self.count == local(self.param).numel()


@dataclass(frozen=True)
class RoundingKey:
    """What, beside name and element, the random numbers of one step depend on."""

    seed: int
    step: int

    def round_into(self, out: Tensor, x: Tensor, name: str, start: int, box: Box | None) -> None:
        """Round `x`, whose first element is `start` in the box that this rank holds, None for the whole."""
        if box is None:
            round_into(out, x, self.seed, self.step, name, start)
            return
        source, target = x.contiguous().view(-1), out.view(-1) if out.is_contiguous() else None
        rounded = torch.empty_like(source, dtype=out.dtype) if target is None else target
        for span in box.spans(start, start + x.numel()):
            here = slice(span.start - start, span.stop - start)
            place = span.offset, span.width, span.stride
            round_into(rounded[here], source[here], self.seed, self.step, name, *place)
        if target is None:
            out.copy_(rounded.view(out.shape))


class Stochastic:
    """BF16 alone; what a step adds below its precision is kept in the mean."""

    bytes_beside = 0.0  # what is held for each weight

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        """Copy the weights of each of `segments` into an FP32 tensor."""
        torch._foreach_copy_(outs, [segment.of(segment.param) for segment in segments])

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        """Make the FP32 tensor `x` the weights of `segment`."""
        rounding_key.round_into(segment.of(segment.param), x, segment.name, segment.at, segment.box)

    def held(self, param: Parameter) -> list[Tensor]:
        """The tensors that are kept beside a weight."""
        return []

    def drop(self, param: Parameter) -> None:
        """Let go of what is held beside the weights of one parameter."""


class Nearest(Stochastic):
    """BF16 alone, as a plain torch step leaves it, but computed in FP32."""

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        segment.of(segment.param).copy_(x)


class Master(Stochastic):
    """FP32 masters. Where the weight is no rounding of its master, somebody wrote to the weight: the weight counts."""

    bytes_beside = 4.0

    def __init__(self) -> None:
        self._masters: dict[Parameter, Tensor] = {}

    def held(self, param: Parameter) -> list[Tensor]:
        return [self._masters[param]] if param in self._masters else []

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        for segment, out in zip(segments, outs, strict=True):
            self._read(segment, out)

    def _read(self, segment: Segment, out: Tensor) -> None:
        masters, held = self._masters.get(segment.param), local(segment.param)
        if masters is None or masters.shape != held.shape:
            self._masters[segment.param] = held.float()
        elif masters.device != held.device:
            self._masters[segment.param] = masters.to(held.device)
        read_masters(segment.of(self._masters[segment.param]), segment.of(segment.param), out)

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        segment.of(self._masters[segment.param]).copy_(x)
        segment.of(segment.param).copy_(x)

    def masters(self, segment: Segment) -> Tensor:
        """The FP32 masters of a whole parameter, sharded as the parameter is."""
        out = torch.empty_like(local(segment.param), dtype=torch.float32)
        self.read_all([segment], [out])
        return like(segment.param, out) if is_sharded(segment.param) else out

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        """Take FP32 masters over, from a checkpoint. They hold where the weights are what they round to."""
        self._masters[param] = torch.empty_like(local(param), dtype=torch.float32).copy_(held_part(param, masters))

    def drop(self, param: Parameter) -> None:
        self._masters.pop(param, None)

    def forget(self) -> None:
        """Start again from the BF16 weights."""
        self._masters.clear()


class Split(Master):
    """FP32 masters in two halves, of which the upper one is the weight itself.

    Two halves cannot tell a weight that somebody wrote to; `checksums.py` can. A block of weights keeps its lower
    halves if its values are those that the last step left; else its lower halves become zero, so that the weights
    count. Masters from a checkpoint stay whole until the first step, because the weights may be loaded
    after them, and from a run that rounded ties to even.
    """

    bytes_beside = 2 + 2 / BLOCK

    def __init__(self) -> None:
        super().__init__()
        self._lower: dict[Parameter, Tensor] = {}  # in row-major order, whatever the weight's memory is like
        self._checksums: dict[Parameter, Tensor] = {}  # none of a parameter that a step has been writing to

    def held(self, param: Parameter) -> list[Tensor]:
        return super().held(param) + ([self._lower[param]] if param in self._lower else [])

    def _read(self, segment: Segment, out: Tensor) -> None:
        if segment.param in self._masters:
            super()._read(segment, out)
            return
        if segment.offset == 0:
            self._follow(segment.param)
        if segment.param in self._lower:
            join(segment.of(segment.param), segment.of(self._lower[segment.param]), out)
        else:
            out.copy_(segment.of(segment.param))

    def _follow(self, param: Parameter) -> None:
        held, lower, before = local(param), self._lower.get(param), self._checksums.get(param)
        if lower is not None and lower.shape != held.shape:
            self._lower.pop(param)
            return
        if lower is not None and lower.device != held.device:
            self._lower[param] = lower = lower.to(held.device)
        if lower is not None and before is not None:
            clear_written(held, before.to(held.device), lower)

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        held = local(segment.param)
        if segment.param not in self._lower:
            self._lower[segment.param] = torch.zeros(held.shape, dtype=torch.int16, device=held.device)
        self._checksums.pop(segment.param, None)
        split(x, segment.of(segment.param), segment.of(self._lower[segment.param]))
        if segment.is_last:
            self._masters.pop(segment.param, None)
            self._checksums[segment.param] = checksums(held)

    def drop(self, param: Parameter) -> None:
        super().drop(param)
        self._lower.pop(param, None)
        self._checksums.pop(param, None)

    def forget(self) -> None:
        super().forget()
        self._lower.clear()
        self._checksums.clear()


WAYS = {"stochastic": Stochastic, "nearest": Nearest, "master": Master, "split": Split}
