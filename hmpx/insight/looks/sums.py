"""Gradients of several backward passes, which are added up before a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

import torch

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import Look, few
from hmpx.insight.finding import Finding, Names, percent
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.tensors import Tensor
from hmpx.updates.stepping.names import parameters

_FELT = 0.1  # of the noise between batches: from here on a loss shows it


class _Sum(NamedTuple):
    """A gradient after so many backward passes, and what it would be in FP32."""

    now: Tensor
    exact: Tensor
    passes: int
    squares: Tensor  # of what each pass has added

    @property
    def noise(self) -> float:
        """The square of the noise of the sum: what it varies by with the batches of its passes."""
        spread = (self.squares - self.exact.square() / self.passes).clamp(min=0)
        return float(spread.sum()) * self.passes / (self.passes - 1)

    def is_along(self, other: Tensor) -> bool:
        return other.shape == self.now.shape and bool((other * self.now).sum() >= 0.99 * other.norm() * self.now.norm())


def _is_dense(grad: Tensor | None) -> TypeGuard[Tensor]:
    return type(grad) is Tensor and grad.layout is torch.strided


class Sums(Look):
    """Adds up in FP32 what backward passes add to gradients in low precision."""

    stages = ("backward",)

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}  # of one iteration, by the identity of a parameter
        self._iteration = 0
        self._error = self._size = self._noise = 0.0  # squares, of all steps: of what is off, the sums, and their noise
        self._most = 0  # backward passes before a step
        self._dtype: torch.dtype | None = None

    def see(self, notes: Notes, op: OpCall) -> None:
        variable = getattr(op.node, "variable", None)  # of the node that adds to a gradient
        if variable is None:
            return
        self._turn_to(notes.iteration)
        before = few(op.before[0]).float() if op.before else None
        if op.name != "add_" or before is None or len(op.given) < 2 or not before.any():
            self._sums.pop(id(variable), None)  # another sum begins
        else:
            now, more = few(op.given[0]).float(), few(op.given[1]).float()
            known = self._sums.get(id(variable), _Sum(before, before, 1, before.square()))
            squares = known.squares + more.square()
            self._sums[id(variable)] = _Sum(now, known.exact + more, known.passes + 1, squares)
            self._dtype = op.given[0].dtype

    def _turn_to(self, iteration: int) -> None:
        if iteration != self._iteration:
            self._iteration = iteration
            self._sums.clear()

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Count what the gradients are off by. Clipping leaves their direction; a sum that was thrown away is none."""
        self._turn_to(iteration)
        for p in parameters(optimizer):
            if not _is_dense(grad := p.grad):
                continue
            made = self._sums.pop(id(p), None)
            if made is not None and made.passes > 1 and made.is_along(few(grad).float()):
                self._most = max(self._most, made.passes)
                self._error += float((made.now - made.exact).square().sum())
                self._size += float(made.exact.square().sum())
                self._noise += made.noise

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        if self._size and self._dtype is not None:
            error = (self._error / self._size) ** 0.5
            said = f"gradients of {self._most} backward passes are accumulated in {dtype_name(self._dtype)}, and are "
            of_noise = (self._error / max(self._noise, 1e-12 * self._size)) ** 0.5
            said += f"off by {percent(error)}, {min(of_noise, 1e6):.2g} of the noise between batches"
            do, recipe = (
                "hmpx.attach(optimizer, use_fp32_grad_acc=True) accumulates in float32",
                {"use_fp32_grad_acc": True},
            )
            wrong, weight = error > 0.01 and of_noise > _FELT, min(0.2 + error, 0.8)
            yield Finding("gradient accumulation", wrong, said, do, weight=weight, recipe=recipe)
