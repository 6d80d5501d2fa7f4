"""Findings from the windows of steps: one for each kind and line, of optimizers that are judged one by one.

Each parameter is judged in each window. Dead and half dead parameters count by their share of the weights that a
gradient moves, and by their number. If they counted by their updates, a head that learns fast would hide a backbone
that stands still; if by their weights alone, matrices would hide the norms between them. A window stands for the steps
until the next one, and counts by its share of the whole distance, so that a warm-up is no harm.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import Look
from hmpx.insight.finding import Finding, Names, first_names, percent
from hmpx.insight.looks.steps import LENGTH, Moves, SteppedOptimizer, span_of, total, window_of
from hmpx.insight.notes import Notes
from hmpx.insight.report import grouped, number
from hmpx.insight.tensors import LOW, has_numbers, low_dtype, memory, sample
from hmpx.recipes.recipe import Recipe
from hmpx.updates.holding.held import Way
from hmpx.updates.holding.sharding import local
from hmpx.updates.stepping.names import own_attachment, parameters, trained

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

# Limits of `kept` in all steps together, and in one window. Below them, training falls behind FP32 (the table is in the
# README of insight).
LIMIT, _OF_WINDOW = 0.9, 0.8
_HALF, _DEAD = 0.5, 0.1  # below these, one parameter is half dead, or dead
# A share of the weights. Training loses if more are half dead in one window, or below `_OF_WINDOW` in all steps. If the
# weights as a whole fall behind, it loses if more are below `LIMIT` in one window. And a share of the parameters,
# however small they are: it loses if more are half dead in all steps.
_SHARE = 0.2
_FAR = 0.05  # of the whole distance: a window that moves the copies less harms nothing
_LEAST_DECAY = 5.0  # ulp: a smaller sum of decays may be lost by accident
_HARMLESS = 2e-5  # of a weight in a step: a smaller decay shows only after tens of thousands of steps
_LEAST = {"bfloat16": 2e-3, "float16": 2.4e-4}  # changes by a smaller share of a number are lost by rounding to nearest
_SR = "hmpx.attach(optimizer) (steps and state in FP32, stochastic rounding{})"
_WIDE = "keep the weights in float32 with products in BF16, as torch.autocast does{}"


class Updates(Look):
    """Steps FP32 copies of weights beside each optimizer.

    Attributes:
        looked: the number of steps beside which copies were stepped.
    """

    def __init__(self) -> None:
        self._seen: dict[int, SteppedOptimizer] = {}

    @property
    def looked(self) -> int:
        return max((each.looked for each in self._seen.values()), default=0)

    @property
    def moves(self) -> dict[Parameter, Moves]:
        """How far each parameter has moved beside its copy, in all windows."""
        rows = [row for each in self._seen.values() for window in each.moves.values() for row in window.items()]
        return {p: total(moves for _, moves in its) for p, its in grouped(rows, lambda row: row[0]).items()}

    @property
    def stepped(self) -> Iterator[Parameter]:
        """The parameters that had gradients in a step, also those that their optimizer has lost since."""
        return (p for each in self._seen.values() for p in each.active)

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        own = {*parameters(optimizer)}
        for each in self._seen.values():
            if not own.isdisjoint(parameters(each.optimizer)):  # this one steps in its place
                each.close()
        self._seen[id(optimizer)] = SteppedOptimizer(optimizer, where)

    def passed(self, notes: Notes) -> None:
        for p, seen in notes.weights:
            seen.keeps_gradient = seen.keeps_gradient or p.grad is not None

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        self._seen[id(optimizer)].begin()

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        self._seen[id(optimizer)].end(evaluations)

    def close(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        for each in self._seen.values():
            each.close()

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        for where, at_line in grouped(self._seen.values(), lambda each: each.where).items():
            of_one = [each for each in at_line if len(parameters(each.optimizer)) == 1]  # parts of one model
            for seen in ([of_one] if of_one else []) + [[each] for each in at_line if each not in of_one]:
                yield from _of_line(where, seen, names)

    def unchecked(self, notes: Notes, names: Names) -> Iterator[str]:
        yield from _unchecked([*self._seen.values()])
        if self._seen or notes.are_steps:
            yield from _uncovered(notes, names)


def _of_line(where: str, seen: Sequence[SteppedOptimizer], names: Names) -> Iterator[Finding]:
    half = any(p.dtype is torch.float16 for each in seen for p in parameters(each.optimizer))
    recipe: dict[str, Any] = {"parameter_dtype": "float32"} if half else {"weights": "stochastic"}
    do = (_WIDE if half else _SR).format(_bytes(seen, Recipe(**recipe)))
    ways = [way for each in seen for way in _ways(each)]
    loses_no_update = all(map(_ways, seen)) and all(way.weights != "nearest" for way in ways)
    has_codes = any(isinstance(way.state_dtype, str) for way in ways)
    if loses_no_update and has_codes:  # which may still lose a tenth of what FP32 gains
        do = "hmpx.attach(optimizer, state_dtype=torch.bfloat16): its state is in too few bits for these gradients"
        recipe["state_dtype"] = "bfloat16"
    state = next((dtype_name(each.state_dtype) for each in seen if each.state_dtype), "")
    is_wide = not any(p.dtype in LOW for each in seen for p in parameters(each.optimizer))
    if is_wide:  # what is rounded is the state of weights in FP32
        recipe, do = {}, "keep it in float32, as the weights are: hmpx.attach rounds state beside BF16 weights alone"
    lost = _lost(where, seen, names, do, recipe)
    if lost is not None:
        yield lost
    asked, arrived = sum(each.asked for each in seen), sum(each.arrived for each in seen)
    dtype = next((dtype_name(p.dtype) for each in seen for p in parameters(each.optimizer) if p.dtype in LOW), "")
    if asked >= _LEAST_DECAY and arrived < 0.1 * asked:
        decay = max(each.decay for each in seen)
        said = (
            f"weight decay has no effect on weights in {dtype}: it is to take {decay:.1g} of a weight in a step, and "
        )
        said += f"less than {_LEAST[dtype]:.1g} is rounded away"
        yield Finding("weight decay", decay > _HARMLESS, said, do, where, weight=0.3, recipe=recipe)
    for key in dict.fromkeys(key for each in seen for key in each.falls):
        falls, stays = sum(each.falls[key] for each in seen), sum(each.stays[key] for each in seen)
        if stays > 0.5 * falls:
            said = f"the decay of {key} is lost in {state}: where a gradient is 0, {percent(min(stays / falls, 1))} of "
            said += "what its numbers are to lose in a step stays"
            kind = "rounded state" if is_wide else "optimizer state"
            yield Finding(kind, False, said, do, where, weight=0.25, recipe=recipe)
    rates = [group.get("lr") for each in seen for group in each.optimizer.param_groups]
    low = next((lr.dtype for lr in rates if isinstance(lr, Tensor) and lr.dtype in LOW), None)
    if low is not None:
        said = f"the learning rate is a tensor in {dtype_name(low)}: a factor of 0.999 leaves it as it is"
        do = "give the optimizer a float, or a tensor in float32"
        yield Finding("learning rate", False, said, do, where, weight=0.4)  # a write that loses is told by `writes`


def _ways(each: SteppedOptimizer) -> list[Way]:
    attachment = own_attachment(each.optimizer)
    return [] if attachment is None else attachment.settings.ways


class _Window:
    """How parameters move in one window of steps, or in all of them.

    half_dead: those that move less than half as far as their copies. distance: how far copies move until the next
    window.
    """

    def __init__(self, rows: Mapping[Parameter, Moves], active: Mapping[Parameter, float], steps: int = 1) -> None:
        self.rows, self.whole, self._active = rows, total(rows.values()), active
        self.distance = steps * self.whole.size**0.5
        self.half_dead = self.below(_HALF)
        self.share = self.share_of(self.half_dead)

    def below(self, limit: float) -> list[Parameter]:
        return [p for p, moves in self.rows.items() if moves.is_below(limit)]

    def share_of(self, some_of: Iterable[Parameter]) -> float:
        counts = [sum(p.numel() * self._active.get(p, 1.0) for p in each) for each in (some_of, self.rows)]
        return counts[0] / counts[1] if counts[1] else 0.0

    def kept_by(self, some_of: Iterable[Parameter]) -> float:
        return min(max(total(self.rows[p] for p in some_of).kept, 0), 1)


def _windows(seen: Sequence[SteppedOptimizer]) -> dict[int, _Window]:
    """Return the windows of all optimizers by their first step, and all steps together by 0; {} if none was seen.

    Those in which copies move by less than `_FAR` of the whole distance are left out, and early ones that lose a
    small part of it before a healthy one.
    """
    windows: dict[int, dict[Parameter, Moves]] = {}
    active = {p: share for each in seen for p, share in each.active.items()}
    steps = max((each.steps for each in seen), default=0)
    for each in seen:
        for window, rows in each.moves.items():
            if rows:  # none where weights have become inf or NaN
                windows.setdefault(window, {}).update(rows)
    found = {window: _Window(rows, active, span_of(window, steps)) for window, rows in windows.items()}
    if not found:
        return {}
    moved: dict[Parameter, list[Moves]] = {}
    for one in found.values():
        for p, moves in one.rows.items():
            moved.setdefault(p, []).append(moves.times(one.distance / one.whole.size if one.whole.size else 0.0))
    whole = sum(one.distance for one in found.values())
    every = _Window({p: total(several) for p, several in moved.items()}, active)
    counted = {window: one for window, one in found.items() if one.distance >= _FAR * whole}
    healthy = max((n for n, one in counted.items() if not one.whole.is_below(LIMIT) and one.share <= _SHARE), default=0)
    return {0: every} | {
        window: one
        for window, one in counted.items()  # what a small part loses before a healthy window is made up for
        if window >= healthy or one.distance * max(1 - one.whole.kept, one.share) >= _FAR * whole
    }


class _Lost:
    """Which updates windows show as lost, and whether that harms the training.

    worst: the window in which most of the weights are half dead, and `first` its first step. group: the parameters that
    tell most, of the window `within`: in all steps (is_slow), or in the worst window. share: of the weights, that of
    the group. still: those that are half dead in all steps. are_many: whether these are more than a few. kept: of the
    weights as a whole, in all steps (is_behind), or in the worst window. falls_behind: whether they fall behind.
    """

    def __init__(self, windows: Mapping[int, _Window]) -> None:
        self.every = every = windows[0]
        self.first = max(reversed([*windows]), key=lambda window: (windows[window].share, -windows[window].whole.kept))
        self.worst = worst = windows[self.first]
        slow = every.below(_OF_WINDOW)
        self.is_slow = every.share_of(slow) > worst.share
        self.group, self.within = (slow, every) if self.is_slow else (worst.half_dead, worst)
        self.share = self.within.share_of(self.group)
        self.is_behind = every.whole.is_below(LIMIT)
        self.falls_behind = self.is_behind or any(each.whole.is_below(_OF_WINDOW) for each in windows.values())
        whole = every if self.is_behind else worst
        self.kept = whole.kept_by(whole.rows)
        self.is_any = bool(self.falls_behind or slow or worst.half_dead)
        self.still = every.half_dead
        self.are_many = len(self.still) > max(
            1, _SHARE * len(every.rows)
        )  # as norms are, which hold few of the weights
        losing = max(each.share_of(p for p in each.rows if each.rows[p].kept < LIMIT) for each in windows.values())
        self.wrong = self.share > _SHARE or self.are_many or (self.falls_behind and losing > _SHARE)

    @property
    def harm(self) -> float:
        if not self.wrong:
            return 0.2 * self.share
        return 0.5 + 0.45 * max(1 - self.kept, self.share, len(self.still) / len(self.every.rows))

    def said(self, dtype: str, steps: str, names: Names) -> str:
        """Say how far which weights move. steps: the steps of the worst window, in words."""
        rows, as_far = self.every.rows, "as far as "
        as_far += "float32 weights would" if dtype != "float32" else "with state in float32"
        if self.share in (0, 1) or (self.wrong and self.falls_behind and (self.kept <= _HALF or self.share <= _SHARE)):
            return f"{dtype} weights move {percent(self.kept)} {as_far}{'' if self.is_behind else steps}"
        if self.are_many and self.share <= _SHARE:
            how = _at_most_half(self.still, rows, as_far)
            which = first_names(tuple(names[p] for p in self.still))
            return f"{len(self.still)} of {len(rows)} parameters in {dtype} ({which}) {how}"
        how = f"move {percent(self.within.kept_by(self.group))} {as_far}"
        if not self.is_slow:
            how = _at_most_half(self.group, self.worst.rows, as_far) + steps
        which = first_names(tuple(names[p] for p in self.group))
        return f"{percent(self.share)} of the {dtype} weights ({which}) {how}"


def _at_most_half(params: Sequence[Parameter], rows: Mapping[Parameter, Moves], as_far: str) -> str:
    are_dead = all(rows[p].kept < _DEAD for p in params)
    return "do not move" if are_dead else f"move less than half {as_far}"


def _lost(where: str, seen: Sequence[SteppedOptimizer], names: Names, do: str, recipe: Any) -> Finding | None:
    windows = _windows(seen)
    if not windows or not (lost := _Lost(windows)).is_any:
        return None
    rows, worst, first = lost.every.rows, lost.worst, lost.first
    steps = f" in steps {first} to {first + LENGTH - 1}" if first and len(windows) > 2 else ""
    said = lost.said(dtype_name(next(iter(rows)).dtype), steps, names)
    meant = [p for p in rows if rows[p].kept < LIMIT or p in {*worst.half_dead}] or [*rows]
    told = tuple(names[p] for p in sorted(meant, key=lambda p: worst.rows.get(p, rows[p]).kept))
    of_all = lost.is_slow or lost.is_behind
    figures = tuple(_figures(lost.every if of_all else worst, "" if of_all else steps, seen, names))
    return Finding("lost updates", lost.wrong, said, do, where, told, (), lost.harm, recipe, (), figures)


def _figures(within: _Window, steps: str, seen: Sequence[SteppedOptimizer], names: Names) -> Iterator[str]:
    rows, every = within.rows, within.whole
    losing, least = [p for p in rows if rows[p].kept < LIMIT], min(rows, key=lambda p: rows[p].kept)
    of = " and ".join(dict.fromkeys(type(each.optimizer).__name__ for each in seen))
    yield (
        f"{len(losing)} of {number(len(rows), 'parameter')} of {of} move less than {100 * LIMIT:.0f} % as far as "
        f"float32 copies{steps}; the least, {names[least]}, {percent(min(max(rows[least].kept, 0), 1))}; weighted by "
        f"squared updates, all move {percent(min(max(every.kept, 0), 1))}"
    )
    medians = [each for one in seen for each in one.medians]
    yield (
        f"{percent(every.lost / max(every.updates, 1))} of the updates leave a weight as it was; the median update is "
        f"{statistics.median(medians):.2g} of the distance to the next number that the weight can be"
    )


def _unchecked(seen: Sequence[SteppedOptimizer]) -> list[str]:
    """Say for each optimizer why its updates of weights in low precision could not be judged, if they could not."""
    reasons: dict[str, None] = {}
    for each in seen:
        low = [p for p in parameters(each.optimizer) if p.dtype in LOW]
        windows = _windows([each])
        known = windows[0].whole if windows else Moves()
        still = [p for p, moves in windows[0].rows.items() if not moves.size] if windows else []
        why = each.unchecked
        if not why and not each.looked:
            why = f"in {number(each.steps, 'step')}, none after the first had gradients"
            attachment = own_attachment(each.optimizer)
            if attachment is not None and attachment.settings.release_gradients:
                why = "each gradient is freed in backward, before its step ends: set release_gradients to false"
        if not why and not windows:
            why = "the weights or their float32 copies became inf or NaN"
        elif not why and not known.is_known:
            why = "the float32 copies moved too little to measure it"
        elif not why and windows[0].share_of(still) > _SHARE:
            why = f"the float32 copies of {percent(windows[0].share_of(still))} of them did not move"
        if low and why and each.has_low:
            reasons[f"updates of {dtype_name(low[0].dtype)} weights by {type(each.optimizer).__name__}: {why}"] = None
    return [*reasons]


def _uncovered(notes: Notes, names: Names) -> Iterator[str]:
    """Say which weights in low precision get gradients, while no step and no write that was seen moves them."""
    moved = {memory(p) for p in names}
    moved |= {address for site in notes.sites("write") for address in site.memories}
    left = []
    for p, seen in notes.weights:
        if not p.requires_grad or p in names or memory(p) in moved or not seen.has_gradient:
            continue
        if seen.is_replaced or seen.is_filled or id(p) in notes.copies:
            continue
        if isinstance(p, Parameter) or (len(seen.iterations) > 1 and seen.keeps_gradient):  # it outlives an iteration
            left.append(p)
    if left:
        count, first = sum(p.numel() for p in left), left[0]
        which = f"{count:,} weights in {dtype_name(first.dtype)}, one of shape {tuple(first.shape)}"
        yield f"updates of {which}: they get gradients, and no step and no write that was looked at moves them"


def _bytes(seen: Sequence[SteppedOptimizer], recipe: Recipe) -> str:
    """Say how many bytes a parameter takes, with gradient and state: under a recipe, and today. "" if as many."""
    for each in seen:
        for p in (p for p in parameters(each.optimizer) if p.dtype in LOW):
            state = (each.optimizer.state.get(p) or {}).values()
            held = [t for t in state if isinstance(t, Tensor) and t.dim() and t.shape == p.shape]
            today = 2 * p.element_size() + sum(t.element_size() for t in held)
            then = sum(recipe.bytes_per_parameter(len(held)).values())
            return f", {then:g} bytes per parameter instead of {today}" if then != today else ""
    return ""


# Whether FP32 weights pass through low precision between two steps: a checkpoint that is loaded, a sum over workers.
# All numbers of a weight are then suddenly those of BF16 or FP16, and what the steps since the last such time have
# moved is rounded to these. *kept* is how far the weights have come of that distance, as for steps.

_MOST, _ENOUGH = 4, 16  # parameters of an optimizer that are looked at, the largest; and how many numbers tell


@dataclass
class _WideWeights:
    """Some weights of one optimizer. last: samples of what a step has left. base: of what they were rounded to."""

    params: list[Parameter]
    where: str
    steps: int = 0
    last: torch.Tensor | None = None
    base: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    rounded: list[int] = field(default_factory=list)  # the steps before which they were
    dot: float = 0.0
    size: float = 0.0

    @property
    def is_due(self) -> bool:
        return bool(window_of(self.steps + 1)) or all(p.is_cpu for p in self.params)

    def now(self) -> torch.Tensor:
        return torch.cat([sample(p, 64) for p in self.params])


class PassedLow(Look):
    """Looks at some FP32 weights as a step begins and as it ends. On a device it does so in windows of steps alone."""

    def __init__(self) -> None:
        self._seen: dict[int, _WideWeights] = {}

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        wide = [p for p in trained(optimizer) if p.dtype is torch.float32 and has_numbers(p)]
        wide = [p for p in wide if local(p).numel() >= _ENOUGH and local(p).layout is torch.strided]
        if wide:
            self._seen[id(optimizer)] = _WideWeights(sorted(wide, key=lambda p: -p.numel())[:_MOST], where)

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        seen = self._seen.get(id(optimizer))
        if seen is None or not seen.is_due:
            return
        now = seen.now()
        dtype = low_dtype(now)
        if not seen.steps and dtype is not None:  # a leg of its own goes on from weights that were here
            for each in self._seen.values():
                is_same = [*map(id, each.params)] == [*map(id, seen.params)]
                if each.last is not None and (is_same or torch.equal(each.last.to(dtype).float(), now)):
                    seen.last, seen.base = each.last, each.base
        seen.base = now if seen.base is None else seen.base
        if seen.last is not None and low_dtype(seen.last) is None and dtype is not None:
            meant, real = seen.last - seen.base, seen.last.to(dtype).float() - seen.base
            seen.dot, seen.size = seen.dot + float(meant @ real), seen.size + float(meant @ meant)
            seen.rounded.append(seen.steps + 1)
            seen.base, seen.dtype = now, dtype

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        if (seen := self._seen.get(id(optimizer))) is not None:
            seen.steps += 1
            seen.last = seen.now() if seen.is_due else None

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        for seen in self._seen.values():
            if not seen.rounded or seen.dtype is None:
                continue
            kept, dtype = min(max(seen.dot / (seen.size or 1.0), 0.0), 1.0), dtype_name(seen.dtype)
            told = tuple(names[p] for p in seen.params if p in names)
            said = f"float32 weights ({first_names(told)}) hold numbers of {dtype} alone before step {seen.rounded[0]}"
            said += f" and {number(len(seen.rounded) - 1, 'later one')}" if seen.rounded[1:] else ""
            said += f", as they did not after the step before: they keep {percent(kept)} of the way that they had gone"
            do, wrong = "copy, save and average weights in float32", kept < LIMIT
            yield Finding("rounded between steps", wrong, said, do, seen.where, told, weight=0.8 if wrong else 0.1)
