"""What lists do to batches that were not scored: measured, against FP32."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hmpx.errors import HmpxError
from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.comparing.computing import in_fp32
from hmpx.insight.comparing.noise import Noise
from hmpx.insight.comparing.passes import is_recomputing
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.comparing.subject import Subject
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.insight.tuning.problem import Effect
from hmpx.insight.tuning.raising import check_finite, said
from hmpx.ops.observing import Seen, unobserved
from hmpx.ops.overriding import call

Drawn = dict[tuple[Compared, int], Tensor]  # the state of torch's generator before each call that draws


class _Numbered:
    """A run whose calls draw the random numbers that those of another have drawn."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn = drawn
        self._numbers: Counter[Compared] = Counter()
        self.by_hand: list[str] = []  # lines of casts to low precision that the program makes itself

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():
            return self._seen(asked)
        self._numbers[asked.site] += 1
        seen = self._called(asked, (asked.site, self._numbers[asked.site]))
        if asked.point.op == "to" and _dtypes(seen.result) & LOW - _dtypes(asked.args):
            self.by_hand.append(asked.site.where)
        return seen

    def _called(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        if number in self._drawn:
            generators.set_state(self._drawn[number])
        return self._seen(asked)

    def _seen(self, asked: Asked) -> Seen:
        raise NotImplementedError


class Exact(_Numbered):
    """Everything in FP32; it notes which calls draw."""

    def _called(self, asked: Asked, number: tuple[Compared, int]) -> Seen:
        before = generators.get_state()
        seen = self._seen(asked)
        if not torch.equal(before, generators.get_state()):
            self._drawn[number] = before
        return seen

    def _seen(self, asked: Asked) -> Seen:
        with unobserved():
            return asked.answer(in_fp32(asked))


class Divided(_Numbered):
    """As lists do that put some sites into BF16 and others into FP32; None of a site: it is in neither list."""

    def __init__(self, drawn: Drawn, is_low: Callable[[Compared], bool | None]) -> None:
        super().__init__(drawn)
        self._is_low = is_low

    def _seen(self, asked: Asked) -> Seen:
        low = self._is_low(asked.site)
        if asked.point.in_place or low:
            return asked.plainly()
        with unobserved():
            if low is None:
                return asked.answer(call(asked.point.original, asked.args, asked.kwargs))
            return asked.answer(in_fp32(asked))


class Listed(_Numbered):
    """Under the lists that are in force. low: takes of each site whether its inputs are in low precision."""

    def __init__(self, drawn: Drawn, low: dict[Compared, bool]) -> None:
        super().__init__(drawn)
        self._low = low

    def _seen(self, asked: Asked) -> Seen:
        seen = asked.plainly()
        dtypes = {tensor.dtype for tensor in floating((seen.args, seen.kwargs))}
        self._low[asked.site] = bool(dtypes) and dtypes <= LOW
        return seen


class HeldOut:
    """Batches that are not scored, with their losses and gradients in FP32.

    loss_noise: between the losses of batches. passes: forward and backward, so far.
    by_hand: lines where the program itself casts to low precision.
    """

    def __init__(self, subject: Subject, sites: Sites, batches: Sequence[tuple]) -> None:
        self._subject, self._sites, self.batches = subject, sites, batches
        self._exact: list[tuple[float, list[Tensor], Drawn]] = []
        self.passes = 0
        self.loss_noise = math.inf
        self.by_hand: dict[str, None] = {}

    @property
    def model(self) -> torch.nn.Module:
        """The model."""
        return self._subject.model

    @property
    def device(self) -> torch.device:
        """That of the model."""
        return self._subject.parameters[0].device

    def prepare(self) -> None:
        """The run in FP32."""
        noise = Noise()
        for number, batch in enumerate(self.batches):
            drawn: Drawn = {}
            loss, gradients = self.run(Exact(drawn), functools.partial(self._subject.wide, batch))
            check_finite(loss, gradients, f"held-out batch {number}")
            noise.add(gradients, gradients)
            self._exact.append((loss, gradients, drawn))
        if math.isnan(noise.noise):
            raise HmpxError("tune: the held-out batches are all alike, so there is no noise between them; give others")

    def run(self, now: _Numbered, work: Callable[[], tuple[float, list[Tensor]]]) -> tuple[float, list[Tensor]]:
        self._sites.now = now
        self.passes += 1
        try:
            return work()
        finally:
            self._sites.now = None
            self.by_hand |= dict.fromkeys(now.by_hand)

    @property
    def losses(self) -> list[float]:
        """In FP32."""
        return [loss for loss, _, _ in self._exact]

    def measured(self, make: Callable[[Drawn], _Numbered]) -> Effect:
        """What a pass does to all batches under the lists that are in force."""
        return self._effect(make, self._subject.low)

    def shaken(self) -> Effect | None:
        """What FP32 does when the floating inputs of the batches are rounded to BF16: the floor of what one can ask.

        None where batches have no such inputs.
        """
        with unobserved():
            inputs = [tree_map(_rounded, batch) for batch in self.batches]
        if not any(isinstance(each, Tensor) and each.dtype is torch.float32 for each in tree_leaves(inputs)):
            return None
        rest = iter(inputs)
        return self._effect(lambda drawn: Exact(dict(drawn)), lambda batch: self._subject.wide(next(rest)))

    def _effect(
        self, make: Callable[[Drawn], _Numbered], work: Callable[[tuple], tuple[float, list[Tensor]]]
    ) -> Effect:
        noise, changes = Noise(), []
        for batch, (exact, gradients, drawn) in zip(self.batches, self._exact, strict=True):
            try:
                loss, found = self.run(make(drawn), functools.partial(work, batch))
            except Exception as error:  # a choice with which the program does not run is one that does not hold
                return Effect(*(math.inf,) * 4, said(error))
            noise.add(gradients, found)
            changes.append(loss - exact)
        change = math.sqrt(statistics.fmean(change * change for change in changes))
        return Effect(noise.error, noise.shared, change, change / self.loss_noise)


def _dtypes(value: object) -> set[torch.dtype]:
    return {tensor.dtype for tensor in floating((value,))}


def _rounded(value: object) -> object:
    if isinstance(value, Tensor) and value.dtype is torch.float32:
        return value.bfloat16().float()
    return value
