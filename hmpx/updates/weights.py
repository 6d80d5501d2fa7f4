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

The split: ``weight = (bits + 0x8000) >> 16``, ``rest = int16(bits)``, ``bits = (weight << 16) + rest``. The weight is
the master rounded to nearest, ties away from zero (`master` has torch's ties to even). Exact for every number and for
inf. NaN stays NaN in both; payloads that rounding would carry out of the NaNs become the quiet NaN's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hmpx.rounding import round_into

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

    def extra(self) -> dict[Parameter, Tensor]:
        """What is kept beside the weights; an entry deleted here is made anew from the weight."""
        return {}


class Nearest(Stochastic):
    """BF16 alone, as a plain torch step leaves it, but computed in FP32."""

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        run.of(run.param).copy_(x)


class Master(Stochastic):
    """FP32 masters. Where the weight is no rounding of its master, somebody wrote to the weight: the weight counts."""

    def __init__(self) -> None:
        self._masters: dict[Parameter, Tensor] = {}

    def extra(self) -> dict[Parameter, Tensor]:
        return self._masters

    def read_all(self, runs: list[Run], outs: list[Tensor]) -> None:
        for run, out in zip(runs, outs, strict=True):
            self.read(run, out)

    def read(self, run: Run, out: Tensor) -> None:
        """`read_all` of one."""
        weight = run.of(run.param)
        if run.param not in self._masters:
            self._masters[run.param] = run.param.float()
        out.copy_(run.of(self._masters[run.param]))
        halves = (out.to(torch.bfloat16), upper_half(out))  # ties to even, and ties away as a split leaves them
        written = (halves[0] != weight) & (halves[1] != weight)
        if written.any():
            torch.where(written, weight.float(), out, out=out)

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        run.of(self._masters[run.param]).copy_(x)
        run.of(run.param).copy_(x)

    def masters(self, run: Run) -> Tensor:
        """The FP32 masters of a whole parameter."""
        out = torch.empty_like(run.param, dtype=torch.float32)
        self.read(run, out)
        return out

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        """Take FP32 masters over, from a checkpoint; the weights follow."""
        self._masters[param] = masters.clone()
        param.copy_(masters)


class Split(Master):
    """FP32 masters in two halves, of which the upper one is the weight itself."""

    def read(self, run: Run, out: Tensor) -> None:
        if run.param in self._masters:
            join(run.of(run.param), run.of(self._masters[run.param]), out)
        else:
            out.copy_(run.of(run.param))

    def write(self, run: Run, x: Tensor, numbers: Numbers) -> None:
        if run.param not in self._masters:
            self._masters[run.param] = torch.zeros_like(run.param, dtype=torch.int16)
        split(x, run.of(run.param), run.of(self._masters[run.param]))

    def set_masters(self, param: Parameter, masters: Tensor) -> None:
        self._masters[param] = torch.empty_like(param, dtype=torch.int16)
        split(masters, param, self._masters[param])


WAYS = {"stochastic": Stochastic, "nearest": Nearest, "master": Master, "split": Split}


def upper_half(x: Tensor) -> Tensor:
    """FP32 to BF16, to nearest, ties away from zero."""
    return (_canonical_bits(x).add_(0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def split(x: Tensor, upper: Tensor, lower: Tensor) -> None:
    """FP32 `x` into BF16 `upper` and int16 `lower`, which `join` puts together again."""
    bits = _canonical_bits(x)
    lower.copy_(bits)  # to the low 16 bits, as C casts
    upper.view(torch.int16).copy_(bits.add_(0x8000) >> 16)


def join(upper: Tensor, lower: Tensor, out: Tensor) -> None:
    """The inverse of `split`, into the FP32 tensor `out`."""
    bits = out.view(torch.int32)
    bits.copy_(upper.view(torch.int16))
    bits.bitwise_left_shift_(16).add_(lower)


def _canonical_bits(x: Tensor) -> Tensor:
    """The bits of `x` in a tensor of its own, with the NaNs that rounding would make something else quiet."""
    bits = x.view(torch.int32).clone()
    magnitude = bits & 0x7FFFFFFF
    lost = ((magnitude > 0x7F800000) & (magnitude < 0x7F808000)) | (magnitude >= 0x7FFF8000)
    if lost.any():
        bits[lost] = bits[lost].bitwise_and_(-0x80000000).bitwise_or_(0x7FC00000)
    return bits
