"""Ways to hold the weights of a BF16 model between two steps.

Each knows two things about a run of elements: how to read it in FP32 and how to write it back, both of them under
`torch.no_grad()`.

==========  ==========================================================  =======================
stochastic  BF16 weights, stochastic rounding on write-back             + 0 bytes a parameter
nearest     BF16 weights, round to nearest, which loses small updates   + 0
master      BF16 weights beside FP32 masters that the optimizer works   + 4
            on (Neuron's FP32ParamsCopy, NxD's use_master_weights)
split       the same masters, bit for bit: the BF16 weight is their     + 2
            upper half, an int16 the rest
==========  ==========================================================  =======================

`halves.py` has the split. Its weight is the master rounded to nearest with ties away from zero; `master` has torch's
ties to even.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hmpx.rounding import round_into
from hmpx.sharding import Box, held_part, is_sharded, like, local
from hmpx.updates.halves import follow, join, split

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Run:
    """A parameter, or the elements `start` ... `stop - 1` of it in row-major order.

    Of a sharded parameter it is those that this rank holds, and `box` is where they stand. A part of a contiguous
    parameter is shown flat. A part of any other is made of whole rows along the first dimension, `rows` says so, and is
    shown in their shape.
    """

    param: Parameter
    name: str
    start: int | None = None
    stop: int | None = None
    rows: bool = False
    box: Box | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This run of a tensor shaped like the parameter, as a view; under `torch.no_grad()`."""
        tensor = local(tensor)
        if self.start is None:
            return tensor
        if self.rows:
            row = tensor.numel() // tensor.shape[0]
            return tensor[self.start // row : self.stop // row]
        return tensor.view(-1)[self.start : self.stop]

    def parts(self, size: int, rows: bool) -> Iterator[Run]:
        """A whole run in parts of at most `size` elements, or of one row where that is more."""
        if rows:
            row = self.count // local(self.param).shape[0]
            size = max(size // row, 1) * row
        for start in range(0, self.count or 1, size):  # a rank may hold nothing, and has state all the same
            yield replace(self, start=start, stop=min(start + size, self.count), rows=rows)

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
class Numbers:
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

    beside: torch.dtype | None = None  # of what is held for each weight, one number

    def read_all(self, runs: list[Run], outs: list[Tensor]) -> None:
        """Copy the weights of each of `runs` into an FP32 tensor."""
        torch._foreach_copy_(outs, [run.of(run.param) for run in runs])

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        """Make the FP32 tensor `x` the weights of `run`."""
        numbers.round_into(run.of(run.param), x, run.name, run.offset, run.box)

    def accept(self, param: Parameter) -> None:
        """The weight was written to without a meaning: a step was taken back, or the parameter was copied."""

    def forget_written(self) -> None:
        """Let go of what belongs to weights that somebody wrote to."""


class Nearest(Stochastic):
    """BF16 alone, as a plain torch step leaves it, but computed in FP32."""

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        run.of(run.param).copy_(x)


class Master(Stochastic):
    """FP32 masters. Where the weight is no rounding of its master, somebody wrote to the weight: the weight counts."""

    beside = torch.float32

    def __init__(self) -> None:
        self._masters: dict[Parameter, Tensor] = {}

    def read_all(self, runs: list[Run], outs: list[Tensor]) -> None:
        for run, out in zip(runs, outs, strict=True):
            self._read(run, out)

    def _read(self, run: Run, out: Tensor) -> None:
        masters, held = self._masters.get(run.param), local(run.param)
        if masters is None or masters.shape != held.shape:
            self._masters[run.param] = held.to(Master.beside)
        follow(run.of(self._masters[run.param]), run.of(run.param), out)

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        run.of(self._masters[run.param]).copy_(x)
        run.of(run.param).copy_(x)

    def masters(self, run: Run) -> Tensor:
        """The FP32 masters of a whole parameter, sharded as the parameter is."""
        out = torch.empty_like(local(run.param), dtype=torch.float32)
        self.read_all([run], [out])
        return like(run.param, out) if is_sharded(run.param) else out

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        """Take FP32 masters over, from a checkpoint. They hold where the weights are what they round to."""
        self._masters[param] = torch.empty_like(local(param), dtype=torch.float32).copy_(held_part(param, masters))

    def forget(self) -> None:
        """Start again from the BF16 weights."""
        self._masters.clear()


class Split(Master):
    """FP32 masters in two halves, of which the upper one is the weight itself.

    Two halves cannot tell a weight that somebody wrote to; its version counter and address can, unless it was written
    to through `.data`. Masters from a checkpoint stay whole until the first step, because the weights may be loaded
    after them, and from a run that rounded ties to even.
    """

    beside = torch.int16

    def __init__(self) -> None:
        super().__init__()
        self._lower: dict[Parameter, Tensor] = {}
        self._stamps: dict[Parameter, tuple[int, ...]] = {}

    def _read(self, run: Run, out: Tensor) -> None:
        if run.param in self._masters:
            super()._read(run, out)
            return
        if run.offset == 0:
            self._check(run.param)
        if run.param in self._lower:
            join(run.of(run.param), run.of(self._lower[run.param]), out)
        else:
            out.copy_(run.of(run.param))

    def _check(self, param: Parameter) -> None:
        if self._stamps.get(param) != _stamp(param):
            self._lower.pop(param, None)

    def forget_written(self) -> None:
        for param in list(self._lower):
            self._check(param)

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        if run.param not in self._lower:
            self._lower[run.param] = torch.zeros_like(local(run.param), dtype=self.beside)
        split(x, run.of(run.param), run.of(self._lower[run.param]))
        self.accept(run.param)
        if run.is_last:
            self._masters.pop(run.param, None)

    def accept(self, param: Parameter) -> None:
        self._stamps[param] = _stamp(param)

    def forget(self) -> None:
        super().forget()
        self._lower.clear()


def _stamp(param: Parameter) -> tuple[int, ...]:
    held = local(param)
    return param._version, held._version, held.data_ptr()


WAYS = {"stochastic": Stochastic, "nearest": Nearest, "master": Master, "split": Split}
