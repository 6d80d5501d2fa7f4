"""What becomes of the updates of weights in BF16 and FP16: how far they move, beside FP32 copies of them.

In windows of some steps, early and late, the optimizer's own code steps FP32 copies with the gradients of the script.
*kept* is <movement of the weights, movement of the copies> / <movement of the copies, movement of the copies>: 1 where
the weights move as FP32 weights would, 0 where they stay. It judges every way to hold and to round weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import torch

from hmpx.insight.looks.twin import NotChecked, Twin, twins_of
from hmpx.insight.tensors import LOW, sample, ulp
from hmpx.updates.stepping.names import own_attachment, trained
from hmpx.updates.stepping.optimizer_classes import scope_of
from hmpx.updates.stepping.released import Released

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

LENGTH = 8  # steps of a window


def window_of(step: int) -> int:
    """Return the first step of the window that a step, counted from 1, is in; 0 for none.

    Windows begin at 2, 20, 40, 80, 160 and so on, as a learning rate changes over a training, and with it what is lost:
    little in a warm-up, most where the rate has fallen.
    """
    start = 2 if step < 20 else 20
    while start > 2 and 2 * start <= step:
        start *= 2
    return start if start <= step < start + LENGTH else 0


def span_of(window: int, steps: int) -> int:
    """Return how many steps, of so many, a window stands for: those until the next one begins."""
    after = 20 if window < 20 else 2 * window
    return max(min(after - 1, steps) - window + 1, 1)


class Moves(NamedTuple):
    """Sums over elements, steps and windows of how weights have moved and how their FP32 copies have.

    Attributes:
        dot, size: <weights, copies> and <copies, copies>. noise: the variance of `dot`, if weights were rounded
        stochastically. due: of the elements that would then have stayed more likely than not, the number that would
        have moved. moved: those that did. updates: of copies. lost: those of them that left the weight as it was.
    """

    dot: float = 0.0
    size: float = 0.0
    noise: float = 0.0
    due: float = 0.0
    moved: float = 0.0
    updates: float = 0.0
    lost: float = 0.0

    @property
    def kept(self) -> float:
        return self.dot / self.size if self.size else 1.0

    @property
    def error(self) -> float:
        """The standard deviation of `kept`, if weights are rounded stochastically."""
        return self.noise**0.5 / self.size if self.size else 0.0

    def is_below(self, limit: float) -> bool:
        """Return whether *kept* is below the limit by three errors, or by one if three do not fit between it and 1.

        Or it is below, and fewer elements have moved than that share of those that should have, by three deviations.
        """
        least = limit * self.due
        if self.kept < limit and (self.moved < least - 3 * least**0.5 or (not self.moved and self.due > 8)):  # e^-8
            return True
        surely = self.kept + 3 * self.error < limit
        return surely or (self.kept + self.error < limit and 3 * self.error < 1 - limit)

    @property
    def is_known(self) -> bool:
        """Whether it can be told at all: copies have moved, and by more than the accidents of rounding."""
        return self.size > 0 and (3 * self.error < 0.5 or self.due > 8)

    def times(self, factor: float) -> Moves:
        """Return the same way, each step of it so many times as long."""
        return self._replace(dot=self.dot * factor, size=self.size * factor, noise=self.noise * factor**2)


def total(moves: Iterable[Moves]) -> Moves:
    return Moves(*map(sum, zip(Moves(), *moves, strict=True)))


class _ComparedTwin:
    """A twin and the parameters that it is compared with, over the steps of a window."""

    def __init__(self, twin: Twin) -> None:
        self.twin = twin
        self.sizes = [twin.samples([p]).numel() for p in twin.params]
        self.ulp = torch.cat(
            [ulp(twin.samples(some).float(), dtype) for dtype, some in groupby(twin.params, lambda p: p.dtype)]
        )
        self.state = twin.real_state()
        self._last = self._before = twin.samples(twin.params).float()
        self._copied = twin.weights()
        self._update = torch.zeros_like(self._last)
        self.restart()

    def restart(self) -> None:
        """Begin another window with the state that the twin has by now."""
        self._real, self._ideal, self._noise, self._chances, self._updates, self._lost = torch.zeros_like(
            self._update.expand(6, -1)
        )
        self.medians: list[float] = []
        self._held = self._hidden()  # at the beginning
        self.twin.take_weights()
        self._copied = self.twin.weights()

    @property
    def is_of_state(self) -> bool:
        """Whether state alone is rounded. What that costs grows over the steps, so the twin goes on between windows."""
        return all(p.dtype not in LOW for p in self.twin.params)

    def _hidden(self) -> Tensor | None:
        """Return the weights as the optimizer knows them, which may hold more than their dtype: masters, Kahan terms.

        A copy of it shows them: where it leaves the weights in a step with gradients of zero. None: it has no others.
        """
        attachment = own_attachment(self.twin.optimizer)
        if attachment is not None:
            masters = [attachment.masters_of(p) for p in self.twin.params]
            held = [p if each is None else each for p, each in zip(self.twin.params, masters, strict=True)]
            return None if all(each is None for each in masters) else self.twin.samples(held).float()
        try:
            return None if scope_of(self.twin.optimizer) == "element" else self.twin.again(0.0).weights()
        except NotChecked:
            return None

    def begin(self) -> None:
        self._before = self.twin.samples(self.twin.params).float()
        if not torch.equal(self._before, self._last):
            self.twin.take_weights()  # something else has moved them: clipping, averaging, a load
            self._copied = self.twin.weights()
        self.twin.step()
        before, self._copied = self._copied, self.twin.weights()
        self._update = self._copied - before

    def end(self) -> None:
        self._last = self.twin.samples(self.twin.params).float()
        moved, update = self._last - self._before, self._update
        self._real += moved
        self._ideal += update
        self._noise += torch.minimum(self.ulp * update.abs(), self.ulp.square() / 4)
        self._chances += (update.abs() / self.ulp).clamp(max=1)
        is_update = (update != 0) & torch.isfinite(update)
        self._updates += is_update
        self._lost += is_update & (moved == 0)
        if is_update.any():
            self.medians.append(float((update.abs() / self.ulp)[is_update].median()))

    def result(self) -> dict[Parameter, Moves]:
        real, ideal = self._real, self._ideal
        if not torch.isfinite(torch.stack([real, ideal])).all():
            return {}
        if float(real @ ideal) < 0.9 * float(ideal @ ideal):
            real, ideal = self._with_hidden(real, ideal)
        likely = 1 - (-self._chances).exp()  # that an element would have moved
        unsure = likely < 0.5  # what moves anyway tells nothing
        counts = [likely * unsure, (real != 0) & unsure, self._updates, self._lost]
        rows = [real * ideal, ideal * ideal, ideal.square() * self._noise, *counts]
        sums = [
            part.double().sum(1).tolist() for part in torch.stack([*map(torch.Tensor.float, rows)]).split(self.sizes, 1)
        ]
        return {p: Moves(*row) for p, row in zip(self.twin.params, sums, strict=True)}

    def _with_hidden(self, real: Tensor, ideal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the movement of the weights as the optimizer knows them, and of the copies, in place of these.

        That is where something beside the weights moves as the copies do. Both begin with it, since the first step of a
        copy leaps to it.
        """
        if self._held is None or (now := self._hidden()) is None:
            return real, ideal
        whole, all_of_it = ideal, now - self._held
        if own_attachment(self.twin.optimizer) is None:
            self.twin.step(0.0)
            whole = self.twin.weights() - self._held
        dot, size = float(all_of_it @ whole), float(whole @ whole)
        is_kept = 0.8 * size < dot < 1.25 * size and dot * dot > 0.8 * float(all_of_it @ all_of_it) * size
        return (all_of_it, whole) if is_kept else (real, ideal)


class SteppedOptimizer:
    """What was seen of one optimizer.

    Attributes:
        where: the line that steps it. steps, looked: how many there were, and how many of them were looked at.
        moves: by window and parameter. active: by parameter, the share of its elements whose gradient is not zero.
        medians: of |update| in units of a weight's last digit.
        unchecked: why its updates could not be looked at; "" if they could.
        asked, arrived: what weight decay does in FP32, and what arrives in the weights, in ulp. decay: the most that it
            takes of a weight in a step.
        falls, stays: by key of state in low precision: by how many shares of them elements fall where the gradient is
            0, and how much of that is lost. state_dtype: of such state.
    """

    def __init__(self, optimizer: Optimizer, where: str) -> None:
        self.optimizer, self.where = optimizer, where
        self.steps = self.looked = 0
        self._moves: dict[int, dict[Parameter, Moves]] = {}  # without those of the window that is open
        self._medians: list[float] = []
        self.unchecked = ""
        self.asked = self.arrived = self.decay = 0.0
        self.falls, self.stays = defaultdict[str, float](float), defaultdict[str, float](float)
        self.state_dtype: torch.dtype | None = None
        self.active: dict[Parameter, float] = {}  # the share of its elements that a gradient is to move
        self.has_low = False  # whether weights in low precision were stepped
        self._window = 0
        self._twins: list[_ComparedTwin] = []
        self._with_grad: list[int] = []
        self._stepping = False

    def begin(self) -> None:
        if self._stepping:
            self._twins = []  # the last one has raised
        if bool(getattr(self.optimizer, "found_inf", None)):
            return
        grads = {p: p.grad for p in trained(self.optimizer) if not isinstance(p.grad, Released | None)}
        window = window_of(self.steps + 1)
        if window != self._window:
            self._turn_to(window)
        if not grads or not (window or self._twins):
            return
        with_grad = list(map(id, grads))
        try:
            if not self._twins or (with_grad != self._with_grad and self._twins[0].twin.is_sampled):
                self._add_up()
                self._twins = [_ComparedTwin(twin) for twin in twins_of(self.optimizer)]
                for p, grad in grads.items():
                    self.active[p] = max(_share(grad), self.active.get(p, 0.0))
                self._with_grad = with_grad
                self._look_at_parts()
            for each in self._twins:
                each.begin()
            self._stepping = bool(self._twins)
        except NotChecked as why:
            self._twins, self.unchecked = [], str(why)

    def end(self, evaluations: int) -> None:
        self.steps += 1
        self.has_low = self.has_low or any(p.dtype in LOW for p in trained(self.optimizer))
        if self._stepping:
            self._stepping = False
            if evaluations > 1:
                self._twins, self.unchecked = [], f"its step calls the closure {evaluations} times"
            self.looked += bool(self._twins and self._window)
            for each in self._twins:
                each.end()

    def close(self) -> None:
        self._add_up()
        self._twins = []

    def _turn_to(self, window: int) -> None:
        self._add_up()
        self._window, self._twins = window, [each for each in self._twins if each.is_of_state]
        for each in self._twins:
            each.restart()

    def _add_up(self) -> None:
        self._moves, self._medians = self.moves, self.medians

    @property
    def moves(self) -> dict[int, dict[Parameter, Moves]]:
        found = {window: {**rows} for window, rows in self._moves.items()}
        for each in self._twins if self._window else ():
            rows = found.setdefault(self._window, {})
            for p, moves in each.result().items():
                rows[p] = total([rows.get(p, Moves()), moves])
        return found

    @property
    def medians(self) -> list[float]:
        return self._medians + [median for each in self._twins for median in each.medians]

    def _look_at_parts(self) -> None:
        """Take the step without weight decay, and with a gradient of zeros, in FP32 and in the dtype of the weights."""
        for each in self._twins if own_attachment(self.optimizer) is None else ():
            twin, decay = each.twin, each.twin.group.get("weight_decay")
            if twin.rows is not None:
                continue
            known: dict[str, Tensor] | None = {} if twin.is_sampled else None
            if decay:
                wide, narrow = (
                    twin.again(1.0, is_wide, known).weights()
                    - twin.again(1.0, is_wide, known, weight_decay=0 * decay).weights()
                    for is_wide in (True, False)
                )
                weights = twin.samples(twin.params).float().abs()
                shares = (wide.abs() / weights)[(weights > 0) & wide.isfinite()]
                self.decay = max(self.decay, float(shares.median()) if shares.numel() else 0.0)
                self.asked += float((wide.abs() / each.ulp).nansum())
                self.arrived += float((narrow * wide.sign() / each.ulp).nansum())
            low = {key: v for key, v in each.state.items() if v.dtype in LOW}
            in_fp32, held = (twin.again(0.0, is_fp32, known).state() if low else {} for is_fp32 in (True, False))
            for key, before in low.items():
                self.state_dtype = before.dtype
                share = in_fp32[key] / before.float()  # a part of 1 where it decays; Kahan terms go to 0
                falls = (share > 0.5) & (share < 1) & (in_fp32[key].abs() > 1e-30)
                self.falls[key] += float((1 - share)[falls].sum())
                self.stays[key] += float((held[key].float() / before.float() - share)[falls].sum())


def _share(grad: Tensor) -> float:
    if grad.is_sparse:
        return grad.coalesce().indices().shape[1] / max(len(grad), 1)
    part = sample(grad)
    return int(part.count_nonzero()) / max(part.numel(), 1)
