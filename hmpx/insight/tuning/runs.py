"""Runs the batches in FP32 and with some ops in low precision, and measures what that changes.

A pass decides for each call of an op in which precision it runs. All passes of a batch draw the same random numbers.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from hmpx.errors import HmpxError
from hmpx.insight import run_state
from hmpx.insight.comparing.calls import Asked, CallSite, Sites, in_fp32, is_recomputing
from hmpx.insight.comparing.noise import Noise, square
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.reasons import in_a_line
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.ops.wrapping.observing import Seen, unobserved
from hmpx.ops.wrapping.overriding import call

Drawn = dict[tuple[CallSite, int], Tensor]  # the state of torch's generator before each call that draws numbers
Compute = Callable[[Asked], Seen]  # computes a call in the precision that a pass gives it
Result = tuple[float, list[Tensor]]  # a loss, and the gradients of the parameters


class TuningPass:
    """A pass in which each call is computed by `compute`.

    drawn: a pass in FP32 (`is_exact`) writes it; every other pass draws the same numbers again. by_hand: the lines
    where the program itself casts to low precision.
    """

    def __init__(self, compute: Compute, drawn: Drawn, is_exact: bool = False) -> None:
        self._compute, self._drawn, self._is_exact = compute, drawn, is_exact
        self._numbers: Counter[CallSite] = Counter()
        self.by_hand: dict[str, None] = {}

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():  # a checkpoint repeats a call that has its number already
            return self._compute(asked)
        self._numbers[asked.site] += 1
        number = asked.site, self._numbers[asked.site]
        if number in self._drawn:
            run_state.set_state(self._drawn[number])
        before = run_state.get_state() if self._is_exact else None
        seen = self._compute(asked)
        if before is not None and not torch.equal(before, run_state.get_state()):
            self._drawn[number] = before
        if asked.point.op == "to" and dtypes(seen.result) & LOW - dtypes(asked.args):
            self.by_hand[asked.site.where] = None
        return seen


def exactly(asked: Asked) -> Seen:
    """Compute a call in FP32."""
    with unobserved():
        return asked.answer(in_fp32(asked))


def mixed(is_low: Callable[[CallSite], bool | None]) -> Compute:
    """Return what computes some sites in low precision and the others in FP32.

    is_low: says which; None for a site that tune does not decide about: it runs in the dtype of its inputs.
    """

    def compute(asked: Asked) -> Seen:
        low = is_low(asked.site)
        if asked.point.in_place or low:
            return asked.plainly()
        if low is None:
            with unobserved():
                return asked.answer(call(asked.point.original, asked.args, asked.kwargs))
        return exactly(asked)

    return compute


def plainly(asked: Asked) -> Seen:
    """Compute a call as the lists in force say."""
    return asked.plainly()


def dtypes(value: object) -> set[torch.dtype]:
    """Return the dtypes of the floating tensors in `value`."""
    return {tensor.dtype for tensor in floating((value,))}


@dataclass(frozen=True)
class Effect:
    """What a choice of precisions changes, beside FP32.

    gradient_error: root mean square over batches, in units of the noise between batches. gradient_bias: the part of it
    that is the same in every batch, in the same units. loss_change: root mean square over batches; loss_error: the
    same in units of the noise between the losses of batches. raised: the exception, where the program raises under
    this choice; every figure is infinite then. by_batch: the larger of both errors, by the number of the batch.
    """

    gradient_error: float = 0.0
    gradient_bias: float = 0.0
    loss_change: float = 0.0
    loss_error: float = 0.0
    raised: str = ""
    by_batch: dict[int, float] = field(default_factory=dict)

    @property
    def size(self) -> float:
        """The one number that a tolerance bounds. The bias counts twice: it may be half of the tolerance."""
        found = max(self.gradient_error, 2 * self.gradient_bias, self.loss_error)
        return found if math.isfinite(self.gradient_error + self.loss_change) else math.inf


class Progress:
    """Counts forward and backward passes. Shows them on standard error: each on a terminal, else one line at the end.

    name: of the function that a user has called. done: how many passes.
    """

    def __init__(self, name: str, shown: bool) -> None:
        self._name, self._shown, self.done = name, shown, 0
        self._began = perf_counter()
        self._drawn = shown and sys.stderr.isatty()

    def step(self, words: str) -> None:
        """Count one pass more. words: what it is for."""
        self.done += 1
        if self._drawn:
            line = f"\r{self._name}: {words}, step {self.done}, {perf_counter() - self._began:.0f} s"
            print(f"{line:100}", end="", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        if self._shown:
            print(f"\r{line:100}".rstrip() if self._drawn else line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print how many passes there were."""
        if self.done:
            self.say(f"{self._name}: {self.done} steps in {perf_counter() - self._began:.0f} s")


class Runs:
    """The batches in FP32, and what choices change in them.

    tuning, held_out: numbers of batches. by_hand: the lines where the program itself casts. noise: root mean square
    distance of the gradient of a batch from the mean of all.
    """

    def __init__(self, subject: Subject, tuning: int, progress: Progress) -> None:
        self.subject, self.sites, self._progress = subject, Sites(), progress
        self.tuning, self.held_out = [*range(tuning)], [*range(tuning, len(subject.batches))]
        self.by_hand: dict[str, None] = {}
        self._exact: list[tuple[float, list[Tensor], Drawn]] = []
        self.noise = self._loss_noise = math.nan

    def _run(
        self, now: TuningPass, work: Callable[..., Result], batch: tuple, words: str, gradients: bool = True
    ) -> Result:
        self.sites.now = now
        try:
            return work(batch, gradients)
        finally:
            self.sites.now = None
            self.by_hand |= now.by_hand
            self._progress.step(words)

    def prepare(self, compute_of: Callable[[int], Compute]) -> None:
        """Run each batch in FP32. compute_of: what computes the calls of the batch of a number."""
        noise = Noise()
        for number, batch in enumerate(self.subject.batches):
            drawn: Drawn = {}
            loss, gradients = self._run(TuningPass(compute_of(number), drawn, True), self.subject.wide, batch, "FP32")
            count = len(self.tuning)
            what = f"batch {number}" if number < count else f"held-out batch {number - count}"
            if not math.isfinite(loss):
                why = f"is {loss} in FP32 already, so there is nothing to compare BF16 with"
                raise HmpxError(f"tune: the loss of {what} {why}")
            with unobserved():  # no list is about what is computed here
                if not math.isfinite(square(gradients)):
                    why = f"are not finite in FP32 already; its loss is {loss:g}"
                    raise HmpxError(f"tune: the gradients of {what} {why}")
                noise.add(gradients, gradients)
            self._exact.append((loss, gradients, drawn))
        with unobserved():
            self.noise = noise.noise
        self._loss_noise = statistics.stdev(loss for loss, _, _ in self._exact) or math.inf

    def check_repeats(self) -> None:
        """Check that FP32 comes to the same loss twice."""
        batch = self.subject.batches[0]
        again, _ = self._run(TuningPass(exactly, {}, True), self.subject.wide, batch, "FP32", False)
        self.subject.check_repeats(self._exact[0][0], again)

    def effect(self, compute: Compute, numbers: Sequence[int], words: str, enough: float = math.inf) -> Effect:
        """Return what other precisions change in the batches of these numbers.

        enough: where the batches so far put the error of all above this size, the others are not run.
        """
        total: list[Tensor] = []
        squares: list[float] = []
        losses: list[float] = []
        n, unit = len(numbers), self._loss_noise
        for number in numbers:
            exact, gradients, drawn = self._exact[number]
            try:
                loss, found = self._run(
                    TuningPass(compute, drawn), self.subject.low, self.subject.batches[number], words
                )
            except Exception as error:  # a choice under which the program does not run does not hold
                return Effect(*(math.inf,) * 4, in_a_line(error))
            with unobserved():
                errors = [b - a for a, b in zip(gradients, found, strict=True)]
                squares.append(square(errors) / self.noise**2)
                total = [a + b for a, b in zip(total, errors, strict=True)] if total else errors
            losses.append((loss - exact) ** 2)
            if max(sum(squares), sum(losses) / unit**2) > n * enough**2:
                break
        shared = 0.0 if math.isfinite(sum(squares)) else math.inf
        if n > 1 and not shared:  # the mean over pairs of batches
            with unobserved():
                shared = max(square(total) / self.noise**2 - sum(squares), 0.0) / (n * (n - 1))
        change = math.sqrt(sum(losses) / n)
        sizes = (math.sqrt(max(a, b / unit**2)) for a, b in zip(squares, losses, strict=True))
        by_batch = dict(zip(numbers, sizes, strict=False))
        return Effect(math.sqrt(sum(squares) / n), math.sqrt(shared), change, change / unit, by_batch=by_batch)
