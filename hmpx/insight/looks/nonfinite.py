"""The first inf or NaN: in a step, and the op that has made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from hmpx.base.torch_private import norms_of
from hmpx.insight.capture.dispatch import VIEWS
from hmpx.insight.capture.look import Look
from hmpx.insight.capture.places import Notes, OpCall, Spot
from hmpx.insight.finding import Names, Problem
from hmpx.insight.looks.checks import overflow
from hmpx.insight.tensors import LOW, Tensor, is_finite, is_masked, sample
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.released import Released

_UNMADE = frozenset("empty empty_like empty_strided new_empty new_empty_strided resize_".split()) | VIEWS


class Nonfinite(Look):
    """Follows inf and NaN from the op that makes the first of finite numbers to gradients and weights.

    An inf alone harms nothing before a NaN is made of it, or before it reaches a gradient.
    """

    stages = ("forward", "backward", "step")

    def __init__(self) -> None:
        self._iteration = 0  # in which the first inf was made
        self._maker: Spot | None = None  # that made it, or a NaN, of finite numbers
        self._nan: Spot | None = None  # that made a NaN of finite numbers, or of the inf
        self._reached: tuple[str, int, str] | None = None  # weights or gradients, the iteration, the line of the step
        self._lines: dict[int, str] = {}
        self._looked: set[int] = set()
        self._now = 0

    def see(self, notes: Notes, op: OpCall) -> None:
        self._looked.add(notes.iteration)
        if op.name in _UNMADE or self._nan is not None:
            return
        bad = op.nonfinite
        if bad is None or any(map(math.isinf, op.scalars)):
            return
        makes_nan, odd = bool(bad.isnan().any()), [each for each in op.given if each.numel() and not is_finite(each)]
        if self._iteration != notes.iteration:
            self._iteration, self._maker = notes.iteration, None
        if not odd:
            made = bad[~torch.isfinite(bad)]
            masked = overflow(op, notes) is not None or is_masked(op.name.rstrip("_"), op.given, made)
            if masked and op.stage != "backward":
                return
        elif self._maker is None or not makes_nan or any(bool(each.isnan().any()) for each in odd):
            return
        spot = self._note(notes, op, makes_nan) if makes_nan or self._maker is None else None
        self._maker = self._maker or spot
        if makes_nan:
            self._nan = spot

    def _note(self, notes: Notes, op: OpCall, makes_nan: bool) -> Spot:
        """Note the op, at the line of the forward op where autograd runs it."""
        stages = {"forward": "forward", "step": "in the step"}
        said = stages.get(op.stage) or f"in the backward pass ({op.node.name()})"
        numbers = {"nan": makes_nan, "backward": op.stage == "backward", "low": op.out.dtype in LOW}
        place = notes.place_of(op.node)
        return notes.note_line(f"nonfinite in {notes.iteration}", op.name, op.frame, said, place, **numbers)

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._lines[id(optimizer)] = where

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if not bool(getattr(optimizer, "found_inf", None)):
            grads = [p.grad for p in _few(optimizer) if p.grad is not None and type(p.grad) is not Released]
            self._now = iteration
            self._reach("gradients", grads, optimizer, iteration)

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        self._reach("weights", _few(optimizer), optimizer, self._now)

    def _reach(self, what: str, tensors: Sequence[Tensor], optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if self._reached is None and not _are_finite(tensors):
            self._reached = what, iteration, self._lines[id(optimizer)]

    def findings(self, notes: Notes, names: Names) -> Iterator[Problem]:
        what, iteration, where = self._reached or ("", 0, "")
        cause = self._maker if self._nan is not None or self._iteration == iteration else None
        if cause is not None and not (notes.skipped and cause.numbers["backward"]):  # so a GradScaler finds its scale
            yield _made(cause, self._nan, what and f"; {what} are inf or NaN from step {iteration} on")
        elif self._reached is not None and iteration in self._looked:
            said = f"{what} are inf or NaN in step {iteration}, and no op that was looked at made the first"
            do = "torch.autograd.set_detect_anomaly(True) names the op of the forward pass"
            yield Problem("inf or NaN", True, said, do, where, weight=0.9)
        elif self._reached is not None:
            said = (
                f"{what} are inf or NaN {f'from step {iteration} on' if what == 'weights' else f'in step {iteration}'}"
            )
            do = f"doctor --at {iteration} looks at every op of that step and names the first"
            yield Problem("inf or NaN", True, said, do, where, weight=1.0 if what == "weights" else 0.9)


def _made(maker: Spot, nan: Spot | None, rest: str) -> Problem:
    what = "a NaN" if maker.numbers["nan"] else "an inf"
    said = f"{maker.name} is the first op that makes {what} of finite numbers, {maker.said}{maker.place.within}"
    said += f", in {maker.module}" if maker.module else ""
    if nan is not None and nan is not maker:
        said += f"; {nan.name} makes a NaN of it, {nan.said}"
    do = "compute it in float32" if maker.numbers["low"] else "keep its input away from where it is not defined"
    modules = (maker.module,) if maker.module else ()
    return Problem("inf or NaN", True, said + rest, do, maker.where, modules, (maker.name,), 0.97)


def _few(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the smallest parameters: NaN spreads to all."""
    return sorted((p for p in parameters(optimizer) if p.requires_grad), key=lambda p: p.numel())[:8]


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    dense = [few.float() for each in tensors if each.layout is torch.strided and (few := sample(each)).numel()]
    return not dense or all(map(math.isfinite, norms_of(dense, math.inf)))
