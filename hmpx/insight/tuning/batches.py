"""Batches with their FP32 losses and gradients, and how far other runs come from these."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hmpx.errors import HmpxError
from hmpx.insight.comparing.noise import Noise, square
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.reasons import in_a_line
from hmpx.insight.tensors import Tensor
from hmpx.insight.tuning.effect import Effect
from hmpx.insight.tuning.passes import Drawn, Exact, Numbered
from hmpx.ops.observing import unobserved

Run = tuple[float, list[Tensor]]  # a loss and the gradients of the parameters


class Runs:
    """Runs the model. passes: forward and backward, so far. by_hand: lines where the program casts by itself."""

    def __init__(self, subject: Subject, sites: Sites, done: Callable[[str], None] = lambda words: None) -> None:
        self.subject, self.sites, self._done = subject, sites, done
        self.passes = 0
        self.by_hand: dict[str, None] = {}

    def run(self, now: Numbered, work: Callable[[], Run], words: str) -> Run:
        self.sites.now = now
        self.passes += 1
        try:
            return work()
        finally:
            self.sites.now = None
            self.by_hand |= dict.fromkeys(now.by_hand)
            self._done(words)


class Batches:
    """Some batches: what FP32 gives for each, and what other runs change in that.

    what: how an error names one of them. noise: root mean square distance of a batch's gradient from the mean.
    loss_noise: standard deviation of the losses of all batches that there are. order: the numbers of the batches; where
    many choices are measured, the batch that shows most stands first.
    """

    def __init__(self, runs: Runs, batches: Sequence[tuple], what: str) -> None:
        self._runs, self.batches, self._what = runs, batches, what
        self._exact: list[tuple[float, list[Tensor], Drawn]] = []
        self.noise = math.nan
        self.loss_noise = math.inf
        self.order = [*range(len(batches))]

    def prepare(self, exact: Callable[[Drawn], Exact] = Exact) -> None:
        """The run of each batch in FP32."""
        noise = Noise()
        for number, batch in enumerate(self.batches):
            drawn: Drawn = {}
            work = functools.partial(self._runs.subject.wide, batch)
            loss, gradients = self._runs.run(exact(drawn), work, "FP32")
            with unobserved():  # what is computed here is not the program's, and no list is about it
                check_finite(loss, gradients, f"{self._what} {number}")
                noise.add(gradients, gradients)
            self._exact.append((loss, gradients, drawn))
        with unobserved():
            self.noise = noise.noise

    @property
    def losses(self) -> list[float]:
        """In FP32."""
        return [loss for loss, _, _ in self._exact]

    def effect(
        self, make: Callable[[Drawn], Numbered], words: str, first: int | None = None, enough: float = math.inf
    ) -> Effect:
        """What a run changes in the batches, or in the `first` of `order`; the error may be of fewer if it is over.

        enough: a size; where the batches so far put the error of all above it, no further one is run.
        """
        return self._effect(make, self._runs.subject.low, words, self.order[:first], enough)[0]

    def worst_first(self, make: Callable[[Drawn], Numbered], words: str) -> Effect:
        """What a run changes in all batches, which are then ordered by how much that is."""
        effect, squares = self._effect(make, self._runs.subject.low, words, self.order, math.inf)
        if squares:
            by_number = dict(zip(self.order, squares, strict=True))
            self.order.sort(key=lambda number: -by_number[number])
        return effect

    def of_rounded_inputs(self) -> Effect | None:
        """What FP32 makes of the batches when their floating inputs are rounded to BF16; None if they have none."""
        with unobserved():
            inputs = {number: tree_map(_rounded, batch) for number, batch in enumerate(self.batches)}
        if not any(
            isinstance(each, Tensor) and each.dtype is torch.float32 for each in tree_leaves([*inputs.values()])
        ):
            return None
        rest = iter([inputs[number] for number in self.order])
        return self._effect(
            lambda drawn: Exact(dict(drawn)),
            lambda batch: self._runs.subject.wide(next(rest)),
            "verifying",
            self.order,
            math.inf,
        )[0]

    def _effect(
        self,
        make: Callable[[Drawn], Numbered],
        work: Callable[[tuple], Run],
        words: str,
        numbers: Sequence[int],
        enough: float,
    ) -> tuple[Effect, list[float]]:
        """The effect, and the squared gradient error of each batch."""
        total: list[Tensor] = []
        squares: list[float] = []
        losses: list[float] = []
        n = len(numbers)
        for number in numbers:
            exact, gradients, drawn = self._exact[number]
            try:
                loss, found = self._runs.run(make(drawn), functools.partial(work, self.batches[number]), words)
            except Exception as error:  # a choice with which the program does not run is one that does not hold
                return Effect(*(math.inf,) * 4, in_a_line(error)), []
            with unobserved():
                errors = [b - a for a, b in zip(gradients, found, strict=True)]
                squares.append(square(errors))
                total = [a + b for a, b in zip(total, errors, strict=True)] if total else errors
            losses.append((loss - exact) ** 2)
            over = sum(squares) > n * (enough * self.noise) ** 2 or sum(losses) > n * (enough * self.loss_noise) ** 2
            if over and len(squares) < n:
                break
        change = math.sqrt(sum(losses) / n)
        return (
            Effect(
                gradient_error=self._in_noise(sum(squares) / n),
                gradient_bias=self._shared(total, squares, n),
                loss_change=change,
                loss_error=change / self.loss_noise,
            ),
            squares,
        )

    def _shared(self, total: list[Tensor], squares: list[float], n: int) -> float:
        """The part that is the same in every batch, from the pairs of batches."""
        if not math.isfinite(sum(squares)):
            return math.inf
        with unobserved():
            return self._in_noise(max(square(total) - sum(squares), 0.0) / (n * (n - 1))) if n > 1 else 0.0

    def _in_noise(self, squares: float) -> float:
        return math.sqrt(squares) / self.noise


def check_finite(loss: float, gradients: Sequence[Tensor], what: str) -> None:
    """Check what FP32 gives for a batch: everything else is compared with it."""
    if not math.isfinite(loss):
        raise HmpxError(f"tune: the loss of {what} is {loss} in FP32 already, so there is nothing to compare BF16 with")
    if gradients and not math.isfinite(square(gradients)):
        raise HmpxError(f"tune: the gradients of {what} are not finite in FP32 already; its loss is {loss:g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        return value.bfloat16().float()
    return value
