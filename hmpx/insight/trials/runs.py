"""Runs batches in FP32 and with some ops in another precision, and measures what that changes.

`Runs` observes every call of an op. A run gives it a function that computes a call: in FP32, as the lists say, or as a
search asks. All runs of a batch begin from one state (`Subject`) and draw the same random numbers.

**The unit of errors** is the noise between batches. A gradient differs from batch to batch anyway: an error that is
small beside that does nothing, and a bias that is not averaged away does. With g_b the FP32 gradient of batch b of N,
and g their mean, the noise is sqrt(sum |g_b - g|^2 / (N - 1)). The error of a choice of precisions is
sqrt(mean |e_b|^2) / noise, with e_b the change of g_b.

One norm over all parameters hides a part of a model whose gradients are small, and Adam divides each gradient by its
own size. So each parameter is judged, too: by its error beside the size of its own gradient (root mean squares).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from hmpx.base.process_state import lock, observers
from hmpx.conversion import Conversion, install
from hmpx.insight.finding import CallPlaces, in_a_line
from hmpx.insight.tensors import LOW, Tensor, dtypes, random_state, set_random_state
from hmpx.insight.trials.calls import Asked, Compute, RunSite, compute_in_fp32, is_recomputing
from hmpx.insight.trials.subject import Subject
from hmpx.ops.computing.kernels import KernelsAsked
from hmpx.ops.module_rules import ModuleRule
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import EntryPoint, Observer, Run, Seen, unobserved

_ALIKE = 1e-10  # relative variance of gradients that is no more than rounding
_LEAST = 1e-5  # of the size of all: smaller gradients are rounding, such as of a bias before a norm, which has none
PART = 0.4  # what the error of one parameter, beside its own size, counts of an error of all (README.md of insight)
Result = tuple[float, list[Tensor]]  # a loss, and the gradients of the parameters


class Felt:
    """A measured effect on the gradients.

    Attributes:
        gradient_error: of all gradients. part_error: of the worst parameter, beside its own size.
        felt: the larger of the two, where an error of one parameter counts `PART` of an error of all.
    """

    gradient_error: float
    part_error: float

    @property
    def felt(self) -> float:
        return largest_of(self.gradient_error, PART * self.part_error)


@dataclass(frozen=True)
class Effect(Felt):
    """What a choice of precisions changes, beside FP32.

    gradient_error: root mean square over batches, in units of the noise between batches. gradient_bias: the part of it
    that is the same in every batch, in the same units. loss_change: root mean square over batches; loss_error: the
    same in units of the noise between the losses of batches. raised: the exception, where the program raises under
    this choice; every figure is infinite then, as it is where the loss or a gradient is not finite. by_batch: the
    largest of these errors, by the number of the batch. part_error: of the parameter that is the worst, beside the size
    of its own gradient; part: its name.
    """

    gradient_error: float = 0.0
    gradient_bias: float = 0.0
    loss_change: float = 0.0
    loss_error: float = 0.0
    raised: str = ""
    by_batch: dict[int, float] = field(default_factory=dict)
    part_error: float = 0.0
    part: str = ""

    @property
    def size(self) -> float:
        """The one number that a tolerance bounds. The bias counts twice: it may be half of the tolerance."""
        return largest_of(self.felt, 2 * self.gradient_bias, self.loss_error)


def largest_of(*errors: float) -> float:
    """Return the largest of those that were measured; NaN if none was."""
    return max((each for each in errors if not math.isnan(each)), default=math.nan)


class Progress:
    """Counts forward and backward passes. Shows them on standard error: each on a terminal, else one line at the end.

    name: of the function that a user has called. done: how many passes. most: how many there will be at most, in words.
    """

    def __init__(self, name: str, shown: bool) -> None:
        self._name, self._shown, self.done, self.most = name, shown, 0, ""
        self._began = perf_counter()
        self._drawn = shown and sys.stderr.isatty()

    def step(self, words: str) -> None:
        """Count one pass more. words: what it is for."""
        self.done += 1
        if self._drawn:
            line = f"\r{self._name}: {words}, step {self.done}{self.most}, {perf_counter() - self._began:.0f} s"
            print(f"{line:100}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.done and self._shown:
            line = f"{self._name}: {self.done} steps in {perf_counter() - self._began:.0f} s"
            print(f"\r{line:100}".rstrip() if self._drawn else line, file=sys.stderr, flush=True)


class Runs:
    """The batches in FP32, and what choices change in them.

    loss_counts: whether the change of the loss is an error, too. by_hand: the lines where the program itself casts.
    noise: root mean square distance of the gradient of a batch from the mean of all; loss_noise: the same of losses.
    sizes: the mean square of the gradient of each parameter; infinite where it is no more than rounding.
    losses, gradients: in FP32, by batch.
    """

    everything = True

    def __init__(self, subject: Subject, progress: Progress, loss_counts: bool) -> None:
        self.subject, self.loss_counts, self._progress = subject, loss_counts, progress
        self.by_hand: dict[str, None] = {}
        self.losses: list[float] = []
        self.gradients: list[list[Tensor]] = []
        self.noise = self.loss_noise = math.nan
        self.sizes = torch.empty(0)
        self._sites: dict[tuple, RunSite] = {}
        self._places = CallPlaces()
        self._now: Compute | None = None
        self._batch, self._is_exact = 0, False
        self._calls: Counter[RunSite] = Counter()
        # The state of the random generators before each call that draws numbers in FP32, by site and number.
        self._drawn: dict[tuple[RunSite, tuple[int, int]], Tensor] = {}

    @property
    def sites(self) -> list[RunSite]:
        return [*self._sites.values()]

    def leaves(self, caller: types.CodeType) -> bool:
        return False

    def __call__(self, point: EntryPoint, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        """Find the site of a call, and let the current run compute it, with the random numbers of FP32."""
        if self._now is None:
            return run(*args, **kwargs)
        place = self._places.of(frame)
        site = self._sites.get((place, point.op, point.label))
        if site is None:
            site = self._sites[place, point.op, point.label] = RunSite(point.op, place.where or "?", place.module)
        if is_recomputing():
            return self._now(Asked(site, None, point, run, args, kwargs))
        self._calls[site] += 1
        number = self._batch, self._calls[site]
        drawn = self._drawn.get((site, number))
        if drawn is not None:
            set_random_state(drawn)
        before = random_state() if self._is_exact and drawn is None else None
        seen = self._now(Asked(site, number, point, run, args, kwargs))
        if before is not None and not torch.equal(before, random_state()):
            self._drawn[site, number] = before
        if point.op == "to" and dtypes(seen.result) & LOW - dtypes(args):
            self.by_hand[site.where] = None
        return seen

    def run(
        self, compute: Compute, work: Callable[..., Result], number: int, words: str, gradients: bool = True
    ) -> Result:
        """Run a batch, its calls by `compute`. work: of the subject, with or without the weights of the lists."""
        self._now, self._batch = compute, number
        self._calls.clear()
        try:
            return work(self.subject.batches[number], gradients)
        finally:
            self._now = None
            self._progress.step(words)

    def exact(self, number: int, compute: Compute = compute_in_fp32) -> bool:
        """Run a batch in FP32, and keep what others are compared with; return whether loss and gradients are finite."""
        self._is_exact = True
        try:
            loss, gradients = self.run(compute, self.subject.wide, number, "FP32")
        finally:
            self._is_exact = False
        self.losses.append(loss)
        self.gradients.append(gradients)
        with unobserved():  # no list is about what is computed here
            return math.isfinite(loss) and bool(squares_of(gradients).isfinite().all())

    def find_noise(self) -> None:
        """Compute the units of errors, when all batches have run in FP32."""
        with unobserved():
            self.noise = noise_of(self.gradients)
            squares = torch.stack([*map(squares_of, self.gradients)]).mean(0)
            counts = torch.tensor([each.numel() for each in self.gradients[0]])
            least = _LEAST**2 * squares.sum() / counts.sum()
            self.sizes = torch.where(squares > least * counts, squares, math.inf)
        self.loss_noise = (statistics.stdev(self.losses) if len(self.losses) > 1 else 0.0) or math.inf

    def check_repeats(self) -> None:
        again, _ = self.run(compute_in_fp32, self.subject.wide, 0, "FP32", False)
        self.subject.check_repeats(self.losses[0], again)

    def effect(
        self, compute: Compute, numbers: Sequence[int], words: str, enough: float = math.inf, wide: bool = False
    ) -> Effect:
        """Return what other precisions change in the batches of these numbers.

        enough: where the batches so far put the error of all above this size, the others are not run. wide: whether the
        weights are in FP32, too.
        """
        changes = Difference(self, len(numbers))
        for number in numbers:
            try:
                changes.add(number, *self.run(compute, self.subject.wide if wide else self.subject.low, number, words))
            except Exception as error:  # a choice under which the program does not run does not hold
                return Effect(*(math.inf,) * 4, in_a_line(error), part_error=math.inf)
            if changes.so_far > enough:
                break
        return changes.effect()


@contextlib.contextmanager
def observed(
    policy: Policy, kernels: KernelsAsked, observer: Observer, rules: Sequence[ModuleRule] = ()
) -> Iterator[Conversion]:
    """Put a conversion with one observer in force, and the previous one again at the end."""
    with lock:
        others = observers[:]
        observers[:] = [observer]
        try:
            conversion = install(Conversion(policy, kernels=kernels, rules=rules))
        finally:
            observers[:] = others
    with conversion:
        yield conversion


class Difference:
    """Adds up what a choice changes, batch by batch, of `n` batches in all."""

    def __init__(self, runs: Runs, n: int) -> None:
        self._runs, self._n = runs, n
        self._total: list[Tensor] = []
        self._squares: dict[int, Tensor] = {}  # of the changes of gradients, by batch and parameter, and of losses
        self._losses: dict[int, float] = {}

    def add(self, number: int, loss: float, gradients: list[Tensor]) -> None:
        change = loss - self._runs.losses[number]
        with unobserved():
            errors = [b - a for a, b in zip(self._runs.gradients[number], gradients, strict=True)]
            squares = squares_of(errors)
            self._total = [a + b for a, b in zip(self._total, errors, strict=True)] if self._total else errors
        self._squares[number] = squares if math.isfinite(change) else torch.full_like(squares, math.inf)
        self._losses[number] = change * change if math.isfinite(change) else math.inf

    def _sizes(self, squares: Tensor, losses: float) -> tuple[float, float, float]:
        """Return squared errors: of gradients and of losses in their units, and of the worst parameter in its own.

        The second is 0 where it does not count.
        """
        runs, whole = self._runs, float(squares.sum())
        if not math.isfinite(whole):
            return (math.inf,) * 3
        loss_error = losses / runs.loss_noise**2 if runs.loss_counts else 0.0
        return whole / runs.noise**2, loss_error, float((squares / runs.sizes).max())

    def _error(self, squares: Tensor, losses: float, n: int = 1) -> float:
        whole, loss_error, part = self._sizes(squares, losses)
        return math.sqrt(largest_of(whole, loss_error, PART**2 * part) / n)

    @property
    def so_far(self) -> float:
        """The error of all batches, if the others had none."""
        with unobserved():
            return self._error(torch.stack([*self._squares.values()]).sum(0), sum(self._losses.values()), self._n)

    def effect(self) -> Effect:
        n, losses = self._n, sum(self._losses.values())
        with unobserved():
            total = torch.stack([*self._squares.values()]).sum(0)
            squares, loss_error, part = self._sizes(total, losses)
            shared = math.inf if squares == math.inf else 0.0
            if n > 1 and not shared:  # the mean over pairs of batches
                of_all = float(squares_of(self._total).sum())
                shared = max(of_all / self._runs.noise**2 - squares, 0.0) / (n * (n - 1))
            by_batch = {i: self._error(self._squares[i], self._losses[i]) for i in self._squares}
            worst = int((total / self._runs.sizes).argmax()) if 0 < part < math.inf else None
        figures = (squares / n, shared, losses / n, loss_error / n, part / n)
        error, bias, change, loss_error, part = map(math.sqrt, figures)
        name = "" if worst is None else self._runs.subject.names[worst]
        return Effect(error, bias, change, loss_error, by_batch=by_batch, part_error=part, part=name)


def noise_of(gradients: Sequence[Sequence[Tensor]]) -> float:
    """Return the distance of a batch's gradient from the mean, root mean square; NaN for batches that are alike.

    gradients: for each batch, those of all parameters.
    """
    n = len(gradients)
    if n < 2 or not gradients[0]:
        return math.nan
    total = [torch.zeros_like(each) for each in gradients[0]]
    for batch in gradients:
        for each, gradient in zip(total, batch, strict=True):
            each.add_(gradient)
    whole, mean = sum(float(squares_of(each).sum()) for each in gradients) / n, float(squares_of(total).sum()) / n**2
    return math.sqrt((whole - mean) * n / (n - 1)) if whole - mean > _ALIKE * mean else math.nan


def squares_of(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of each gradient, in FP64."""
    norms = [torch.linalg.vector_norm(each).to(gradients[0].device) for each in gradients]
    return torch.stack(norms).cpu().double().square()
