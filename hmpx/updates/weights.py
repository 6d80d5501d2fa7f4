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

from dataclasses import dataclass

import torch

from hmpx.rounding import round_into
from hmpx.updates.halves import follow, join, split

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


@dataclass(frozen=True, eq=False)
class Run:
    """The elements `start` ... `stop - 1` of a parameter, or all of them, in its own shape, where `start` is None."""

    param: Parameter
    name: str
    start: int | None = None
    stop: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """This run of a tensor shaped like the parameter: a flat view, or the tensor itself."""
        return tensor if self.start is None else tensor.view(-1)[self.start : self.stop]

    def part(self, start: int, stop: int) -> Run:
        """Some elements of a whole run."""
        return Run(self.param, self.name, start, min(stop, self.param.numel()))

    @property
    def offset(self) -> int:
        return self.start or 0

    @property
    def count(self) -> int:
        return self.param.numel() if self.start is None else self.stop - self.start


@dataclass(frozen=True)
class Numbers:
    """What, beside name and element, the random numbers of one step depend on."""

    seed: int
    step: int

    def round_into(self, out: Tensor, x: Tensor, name: str, offset: int) -> None:
        round_into(out, x, self.seed, self.step, name, offset)


class Stochastic:
    """BF16 alone; what a step adds below its precision is kept in the mean."""

    def read_all(self, runs: list[Run], outs: list[Tensor]) -> None:
        """Copy the weights of each of `runs` into an FP32 tensor."""
        torch._foreach_copy_(outs, [run.of(run.param) for run in runs])

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        """Make the FP32 tensor `x` the weights of `run`."""
        numbers.round_into(run.of(run.param), x, run.name, run.offset)


class Nearest(Stochastic):
    """BF16 alone, as a plain torch step leaves it, but computed in FP32."""

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        run.of(run.param).copy_(x)


class Master(Stochastic):
    """FP32 masters. Where the weight is no rounding of its master, somebody wrote to the weight: the weight counts."""

    def __init__(self) -> None:
        self._masters: dict[Parameter, Tensor] = {}

    def read_all(self, runs: list[Run], outs: list[Tensor]) -> None:
        for run, out in zip(runs, outs, strict=True):
            self._read(run, out)

    def _read(self, run: Run, out: Tensor) -> None:
        if run.param not in self._masters:
            self._masters[run.param] = run.param.float()
        follow(run.of(self._masters[run.param]), run.of(run.param), out)

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        run.of(self._masters[run.param]).copy_(x)
        run.of(run.param).copy_(x)

    def masters(self, run: Run) -> Tensor:
        """The FP32 masters of a whole parameter."""
        out = torch.empty_like(run.param, dtype=torch.float32)
        self.read_all([run], [out])
        return out

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        """Take FP32 masters over, from a checkpoint; the weights follow."""
        self._masters[param] = masters.clone()
        param.copy_(masters)

    def forget(self) -> None:
        """Start again from the BF16 weights."""
        self._masters.clear()


class Split(Master):
    """FP32 masters in two halves, of which the upper one is the weight itself.

    Masters from a checkpoint stay whole until the first step. The weights may be loaded after them, from a run that
    rounded ties to even; two halves could not tell.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lower: dict[Parameter, Tensor] = {}

    def _read(self, run: Run, out: Tensor) -> None:
        if run.param in self._masters:
            super()._read(run, out)
        elif run.param in self._lower:
            join(run.of(run.param), run.of(self._lower[run.param]), out)
        else:
            out.copy_(run.of(run.param))

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        if run.param not in self._lower:
            self._lower[run.param] = torch.zeros_like(run.param, dtype=torch.int16)
        split(x, run.of(run.param), run.of(self._lower[run.param]))
        if run.offset + run.count == run.param.numel():
            self._masters.pop(run.param, None)

    def forget(self) -> None:
        super().forget()
        self._lower.clear()


WAYS = {"stochastic": Stochastic, "nearest": Nearest, "master": Master, "split": Split}
