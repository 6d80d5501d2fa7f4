"""The runs that tune compares: every op in FP32, chosen ops in BF16, or all as lists say; and what a choice changes.

A pass decides for every call of an op in which precision it is computed. All passes draw the same random numbers.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hmpx.errors import HmpxError
from hmpx.insight import run_state as generators
from hmpx.insight.comparing.calls import Asked, Compared, Sites, in_fp32, is_recomputing
from hmpx.insight.comparing.noise import Noise, square
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.reasons import in_a_line
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.ops.policies.policy import Rule
from hmpx.ops.wrapping.observing import Seen, unobserved
from hmpx.ops.wrapping.overriding import call

Drawn = dict[tuple[Compared, int], Tensor]  # the state of torch's generator before each call that draws numbers
Run = tuple[float, list[Tensor]]  # a loss and the gradients of the parameters


class Exact:
    """A pass in FP32. It notes the state of the generator before each call that draws.

    by_hand: the lines where the program itself casts to low precision.
    """

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._numbers: Counter[Compared] = Counter()
        self.by_hand: dict[str, None] = {}

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():  # a checkpoint repeats a call that has its number already
            return self.seen(asked)
        self._numbers[asked.site] += 1
        seen = self.numbered(asked, (asked.site, self._numbers[asked.site]))
        if asked.point.op == "to" and dtypes(seen.result) & LOW - dtypes(asked.args):
            self.by_hand[asked.site.where] = None
        return seen

    def numbered(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        """A call that is the first with its number."""
        before = generators.get_state()
        seen = self.seen(asked)
        if not torch.equal(before, generators.get_state()):
            self._drawn[number] = before
        return seen

    def seen(self, asked: Asked) -> Seen:
        """A call, computed as this pass computes it."""
        with unobserved():
            return asked.answer(in_fp32(asked))


class Mixed(Exact):
    """A pass with some sites in BF16 and the others in FP32, which draws what `Exact` drew.

    is_low: says which; None for a site that tune does not decide about: it runs in the dtype of its inputs.
    """

    def __init__(self, drawn: Drawn, is_low: Callable[[Compared], bool | None]) -> None:
        super().__init__(drawn)
        self._is_low = is_low

    def numbered(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        if number in self._drawn:
            generators.set_state(self._drawn[number])
        return self.seen(asked)

    def seen(self, asked: Asked) -> Seen:
        low = self._is_low(asked.site)
        if asked.point.in_place or low:
            return asked.plainly()
        with unobserved():
            if low is None:
                return asked.answer(call(asked.point.original, asked.args, asked.kwargs))
            return asked.answer(in_fp32(asked))


class UnderLists(Mixed):
    """A pass under the lists in force. low: takes of each site whether it ran in low precision, or in FP8."""

    def __init__(self, drawn: Drawn, low: dict[Compared, bool], fp8: bool = False) -> None:
        super().__init__(drawn, low.get)
        self._low, self._fp8 = low, fp8

    def seen(self, asked: Asked) -> Seen:
        seen = asked.plainly()
        ran = dtypes((seen.args, seen.kwargs))
        self._low[asked.site] = asked.point.rule is Rule.FP8 if self._fp8 else bool(ran) and ran <= LOW
        return seen


def dtypes(value: object) -> set[torch.dtype]:
    """Of the floating tensors in a value."""
    return {tensor.dtype for tensor in floating((value,))}


@dataclass(frozen=True)
class Effect:
    """What a choice of precisions changes, beside FP32.

    gradient_error: root mean square over batches, in units of the noise between batches. gradient_bias: the part of it
    that is the same in every batch, in the same units. loss_change: root mean square over batches; loss_error: that in
    units of the noise between the losses of batches. raised: the exception, where the program raises under this choice;
    every other figure is infinite then. by_batch: the larger of both errors in each batch that was run.
    """

    gradient_error: float = 0.0
    gradient_bias: float = 0.0
    loss_change: float = 0.0
    loss_error: float = 0.0
    raised: str = ""
    by_batch: tuple[float, ...] = ()

    @property
    def size(self) -> float:
        """The one number that a tolerance bounds. The bias counts twice: it may be half of the tolerance."""
        found = max(self.gradient_error, 2 * self.gradient_bias, self.loss_error)
        return found if math.isfinite(self.gradient_error + self.loss_change) else math.inf


Make = Callable[[Drawn], Exact]  # a pass, of what the run in FP32 drew


class Runs:
    """The batches in FP32, and what choices change in them.

    tuning, held_out: numbers of batches; of the first, the one that shows most stands in front. passes: forward and
    backward, so far. by_hand: lines where the program casts by itself. noise: root mean square distance of the gradient
    of a batch from the mean of all.
    """

    def __init__(self, subject: Subject, tuning: int, done: Callable[[str], None] = lambda words: None) -> None:
        self.subject, self.sites, self._done = subject, Sites(), done
        self.tuning, self.held_out = [*range(tuning)], [*range(tuning, len(subject.batches))]
        self.passes = 0
        self.by_hand: dict[str, None] = {}
        self._exact: list[tuple[float, list[Tensor], Drawn]] = []
        self.noise = self._loss_noise = math.nan

    def run(self, now: Exact, work: Callable[[], Run], words: str) -> Run:
        """One pass."""
        self.sites.now = now
        self.passes += 1
        try:
            return work()
        finally:
            self.sites.now = None
            self.by_hand |= now.by_hand
            self._done(words)

    def prepare(self, exact: Callable[[Drawn, int], Exact]) -> None:
        """Run each batch in FP32, by the pass that is made for its number."""
        noise = Noise()
        for number, batch in enumerate(self.subject.batches):
            drawn: Drawn = {}
            loss, gradients = self.run(exact(drawn, number), functools.partial(self.subject.wide, batch), "FP32")
            first = self.held_out[0] if self.held_out and number >= self.held_out[0] else 0
            with unobserved():  # what is computed here is not the program's, and no list is about it
                _check_finite(loss, gradients, f"{'held-out ' if first else ''}batch {number - first}")
                noise.add(gradients, gradients)
            self._exact.append((loss, gradients, drawn))
        with unobserved():
            self.noise = noise.noise
        self._loss_noise = statistics.stdev(loss for loss, _, _ in self._exact) or math.inf

    def check_repeats(self) -> None:
        """Check that FP32 comes to one loss twice."""
        batch = self.subject.batches[0]
        again = self.run(Exact({}), functools.partial(self.subject.wide, batch, False), "FP32")[0]
        self.subject.check_repeats(self._exact[0][0], again)

    def effect(self, make: Make, numbers: Sequence[int], words: str, enough: float = math.inf) -> Effect:
        """What a pass changes in some batches.

        enough: a size; where the batches so far put the error of all above it, no further one is run.
        """
        total: list[Tensor] = []
        squares: list[float] = []
        losses: list[float] = []
        n, unit = len(numbers), self._loss_noise
        for number in numbers:
            exact, gradients, drawn = self._exact[number]
            work = functools.partial(self.subject.low, self.subject.batches[number])
            try:
                loss, found = self.run(make(drawn), work, words)
            except Exception as error:  # a choice with which the program does not run is one that does not hold
                return Effect(*(math.inf,) * 4, in_a_line(error))
            with unobserved():
                errors = [b - a for a, b in zip(gradients, found, strict=True)]
                squares.append(square(errors) / self.noise**2)
                total = [a + b for a, b in zip(total, errors, strict=True)] if total else errors
            losses.append((loss - exact) ** 2)
            if max(sum(squares), sum(losses) / unit**2) > n * enough**2:
                break
        shared = 0.0 if math.isfinite(sum(squares)) else math.inf
        if n > 1 and not shared:  # from the pairs of batches
            with unobserved():
                shared = max(square(total) / self.noise**2 - sum(squares), 0.0) / (n * (n - 1))
        change = math.sqrt(sum(losses) / n)
        each = (math.sqrt(max(a, b / unit**2)) for a, b in zip(squares, losses, strict=True))
        return Effect(math.sqrt(sum(squares) / n), math.sqrt(shared), change, change / unit, by_batch=tuple(each))


def _check_finite(loss: float, gradients: Sequence[Tensor], what: str) -> None:
    """Check what FP32 gives for a batch: everything else is compared with it."""
    if not math.isfinite(loss):
        raise HmpxError(f"tune: the loss of {what} is {loss} in FP32 already, so there is nothing to compare BF16 with")
    if not math.isfinite(square(gradients)):
        raise HmpxError(f"tune: the gradients of {what} are not finite in FP32 already; its loss is {loss:g}")
