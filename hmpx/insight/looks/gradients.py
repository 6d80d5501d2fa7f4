"""Whether gradients reach the weights as they are.

`Scale` looks at FP16: a GradScaler that is missing, that finds no scale, or is clipped. `Sums` looks at gradients of
several backward passes that are added up in low precision. `backward` adds to what ``.grad`` holds; a program may do it
by hand, in ``.grad`` or in buffers of its own, and such a sum counts once it is the gradient of a step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import SAMPLE_SIZE, Look, is_of_hook, sampled, unwatched
from hmpx.insight.finding import Finding, Names, asked, percent
from hmpx.insight.looks.checks import LIMIT
from hmpx.insight.looks.dtypes import OFF
from hmpx.insight.looks.steps import window_of
from hmpx.insight.looks.twin import NotChecked, Twin
from hmpx.insight.looks.writes import rows
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.tensors import LOW, Tensor, has_numbers, held_here, sample
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.optimizer_classes import scope_of

Optimizer = torch.optim.Optimizer
_NORMAL = torch.finfo(torch.float16).smallest_normal
_HARMLESS = 0.01  # of the gradients: fewer below the normal numbers cost nothing
_SETTLED = 5  # calls of a GradScaler after which it should have found its scale
_SHORT = 0.25  # of the gradient: what leaves less shortens a step


class _Clipped(NamedTuple):
    """What became of a gradient between its backward pass and the division by its scale.

    left: the share of it. scale: the GradScaler's. is_fixed: whether what is left has a size that does not know the
    scale. reached: of the step that the whole gradient would have made, as far as it goes; NaN if that is not known.
    """

    left: float
    scale: float
    is_fixed: bool
    reached: float


class Scale(Look):
    """Counts the gradients that FP16 cannot hold, and follows gradients from a backward pass to the unscaling."""

    stages = ("backward",)

    def __init__(self) -> None:
        self._has_half = False  # whether a gradient was in FP16
        self._error = self._size = 0.0  # squares, of all gradients that were measured: what is off of them, and they
        self._made: dict[int, dict[torch.nn.Parameter, torch.Tensor]] = {}  # by the identity of an optimizer
        self._optimizers: dict[int, Optimizer] = {}
        self._where: dict[int, str] = {}
        self._clipped: dict[int, list[_Clipped]] = {}

    def met(self, optimizer: Optimizer, where: str) -> None:
        self._optimizers[id(optimizer)], self._where[id(optimizer)] = optimizer, where

    def see(self, notes: Notes, op: OpCall) -> None:
        for result in op.results if not op.is_view else ():
            if result.dtype is torch.float16 and result.numel() > 1:
                size = sample(result, SAMPLE_SIZE).float().abs()
                tiny = (size > 0) & (size < _NORMAL)
                self._has_half = True
                notes.note("gradient in FP16", op, nonzero=int((size > 0).sum()), tiny=int(tiny.sum()))
        if self._has_half and not op.is_view and op.results and not notes.skipped:
            _hand_on(notes, op)

    def passed(self, notes: Notes) -> None:
        for grad in [p.grad for each in self._optimizers.values() for p in parameters(each)]:
            if grad is not None and (off := notes.facts(held_here(grad)).get("off")) is not None:
                size = _square(held_here(grad))
                if math.isfinite(off * size):
                    self._error, self._size = self._error + off * size, self._size + size
        for key, optimizer in self._optimizers.items() if notes.skipped else ():
            if window_of(len(notes.skipped) + 1):
                grads = {p: p.grad for p in parameters(optimizer) if p.grad is not None and p.grad.numel()}
                dense = {p: grad for p, grad in grads.items() if not grad.is_sparse}
                self._made[key] = {p: sampled(held_here(grad)).clone() for p, grad in dense.items()}

    def unscaled(self, optimizer: Optimizer, scale: float) -> None:
        made = self._made.pop(id(optimizer), {})
        made = {p: each for p, each in made.items() if p.grad is not None and not p.grad.is_sparse}
        if not made:
            return
        now = [sampled(held_here(p.grad)).float() for p in made if p.grad is not None]
        counts = [(p.numel() / each.numel()) ** 0.5 for p, each in made.items()]  # a sample stands for the whole
        was, is_now = (
            torch.cat([each.float().flatten() * n for each, n in zip(some, counts, strict=True)])
            for some in (made.values(), now)
        )
        dot, squares, left = float(was @ is_now), float(was @ was), float(is_now @ is_now)
        if not 0 < squares < torch.inf or not left < torch.inf:
            return
        share = dot / squares
        is_along = dot * dot > 0.99 * squares * left
        size = left**0.5 if is_along else max(float(each.abs().max()) for each in now)  # of a norm, or of a value
        is_short = share < _SHORT and size * size < scale
        largest = max(made, key=torch.Tensor.numel)
        reached = _reached(optimizer, largest, share, scale) if is_short and share > 0 else 1.0
        self._clipped.setdefault(id(optimizer), []).append(_Clipped(share, scale, is_short, reached))

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        yield from _of_scale(notes, names, self._off)
        for key, (count, left, reached, scale) in self._shortened():
            said = f"gradients are clipped while a GradScaler's scale of {scale:g} is still in them: {_share(left)} of "
            said += f"them is left, in {count} of {len(self._clipped[key])} steps that were looked at"
            said += f", and a step goes {_share(reached)} as far" if reached == reached else ""
            do, wrong = "scaler.unscale_(optimizer) before the line that clips", reached <= 0.9
            yield Finding("clipping", wrong, said, do, self._where[key], weight=0.85 if wrong else 0.2)

    @property
    def _off(self) -> float:
        """What FP16 has cost the gradients of weights, as a share of them; NaN if none was measured."""
        return (self._error / self._size) ** 0.5 if self._size else math.nan

    def _shortened(self) -> Iterator[tuple[int, tuple[int, float, float, float]]]:
        """Yield optimizers, by identity, most of whose gradients are short: in how many steps, and the medians."""
        for key, seen in self._clipped.items():
            short = [each for each in seen if each.is_fixed]
            if 2 * len(short) > len(seen):
                left, reached = (statistics.median([each[i] for each in short]) for i in (0, 3))
                yield key, (len(short), left, reached, short[-1].scale)

    def unchecked(self, notes: Notes, names: Names) -> Iterable[str]:
        share, _ = _tiny(notes)
        if share > _HARMLESS and not notes.skipped and math.isnan(self._off):
            yield (
                f"what FP16 without a GradScaler costs the gradients of weights, where {percent(share)} of all "
                "gradients are below its normal numbers: it is measured where backward() leaves them to an optimizer"
            )
        late = _late(notes.skipped)
        is_falling = len(late) >= _SETTLED and 2 * sum(late) >= len(late) and notes.scale > 1
        if is_falling:
            yield f"steps: the GradScaler skips them, at a scale of {notes.scale:g} that still falls"
        for key, (_, _, reached, _) in self._shortened():
            if reached != reached:
                name = type(self._optimizers[key]).__name__
                yield f"{name}: how far its steps go with gradients that are clipped while they are scaled"


def _reached(optimizer: Optimizer, p: torch.nn.Parameter, share: float, scale: float) -> float:
    """Return how far a step with a share of a gradient goes, as a share of one with all of it; NaN if unknown.

    Both begin without state. So Adam, which divides by the size of its gradients, goes as far.
    """
    try:
        moves = []
        for factor in (1 / scale, 1 / (share * scale)):
            twin = Twin(optimizer, [p], scope_of(optimizer) == "element", is_fresh=True)
            before = twin.weights()
            twin.step(factor)
            moves.append(float((twin.weights() - before).norm()))
    except NotChecked:
        return float("nan")
    return moves[0] / moves[1] if moves[1] else float("nan")


def _share(share: float) -> str:
    return percent(share) if share > 1e-3 else f"{share:.1g}"


def _late(skipped: Sequence[bool]) -> Sequence[bool]:
    return skipped[len(skipped) // 2 :]


def _square(tensor: torch.Tensor) -> float:
    part = sampled(tensor).float()
    return float(part.square().sum()) * tensor.numel() / max(part.numel(), 1)


def _hand_on(notes: Notes, op: OpCall) -> None:
    """Note of the results of an op in a backward pass what FP16 has cost them, as the square of a share of each.

    It is what the gradients that the op reads are off by, weighted by their sizes, and what it rounds itself: a number
    below the normal ones is off by a share of their last digit, and a cast by what it takes away.
    """
    known = [(off, _square(each)) for each in op.given if (off := notes.facts(each).get("off")) is not None]
    size = sum(each for _, each in known)
    before = sum(off * each for off, each in known) / size if size else max((off for off, _ in known), default=0.0)
    for result in op.results:
        lost = 0.0
        if result.dtype is torch.float16 and result.numel():
            part = sampled(result).float()
            if op.name == "_to_copy":
                was = sampled(op.given[0]).float()
                error, whole = (part - was)[was.abs() < _NORMAL].square().sum(), was.square().sum()
            else:
                tiny = (part != 0) & (part.abs() < _NORMAL)
                error, whole = tiny.sum() * (OFF * _NORMAL * 2**-10) ** 2, part.square().sum()
            lost = min(float(error / whole), 1.0) if whole else 0.0
        if known or lost:
            notes.add(result, off=min(before + lost, 1.0))


def _tiny(notes: Notes) -> tuple[float, int]:
    """Return the share of the nonzero gradients in FP16 that are below its normal numbers, and how many there are."""
    sites = notes.sites("gradient in FP16")
    nonzero = sum(site.numbers["nonzero"] for site in sites)
    return sum(site.numbers["tiny"] for site in sites) / max(nonzero, 1), nonzero


def _of_scale(notes: Notes, names: Names, off: float) -> Iterator[Finding]:
    recipe = {"parameter_dtype": "float32"} if any(p.dtype is torch.float16 for p in names) else {}
    late, (share, nonzero) = _late(notes.skipped), _tiny(notes)
    if notes.sites("gradient in FP16") and not notes.skipped:
        said, cost = "all gradients that were looked at are zero, so nothing is trained", share if off != off else off
        if nonzero:
            said = f"{percent(share)} of the nonzero gradients are below its normal numbers"
            said += f", and those of weights are off by about {percent(off)} for it" if off == off else ""
        device = next((p.device.type for p in names), "cuda")
        do, weight = f'torch.amp.GradScaler("{device}"), or BF16, which needs none', 0.3 + 0.5 * cost
        if recipe:
            do = f"keep the weights in float32, as a GradScaler asks for, under torch.autocast in FP16 with {do}"
        wrong = off >= LIMIT or not nonzero
        said, weight = f"FP16 without a GradScaler: {said}", weight if nonzero else 0.9
        yield Finding("loss scaling", wrong, said, do, weight=weight, recipe=recipe)
    if len(late) >= _SETTLED and 2 * sum(late) >= len(late):
        said = f"GradScaler has skipped {sum(late)} of the last {len(late)} steps, down to a scale of {notes.scale:g}: "
        lasts = notes.scale <= 1
        said += "gradients are inf or NaN at any scale" if lasts else "it is still falling, so nothing is known of them"
        do = f"look for the first op that makes them ({asked('--at 3', 'hmpx.doctor(at=[3])')}), or use BF16, which "
        do += "needs no scale"
        yield Finding("GradScaler", lasts, said, do, weight=0.9, recipe=recipe)


# Sums of gradients

_FELT = 0.1  # of the noise between batches: from here on a loss shows it
_IN_PLACE = ("add_.Tensor", "_foreach_add_.List")
_KEEPING = ("_to_copy", "clone", "copy", "mul", "div")  # ops that keep the direction of a gradient


class _Sum(NamedTuple):
    """A sum of gradients, and what it would be in FP32: samples, flat.

    squares: of what each pass has added. where: the line that adds by hand; "" for `backward`.
    """

    now: Tensor
    exact: Tensor
    passes: int
    squares: Tensor
    dtype: torch.dtype
    where: str = ""

    @property
    def noise(self) -> float:
        """The square of the noise of the sum: what it varies by with the batches of its passes."""
        spread = (self.squares - self.exact.square() / self.passes).clamp(min=0)
        return float(spread.sum()) * self.passes / (self.passes - 1)

    def is_along(self, other: Tensor) -> bool:
        return other.shape == self.now.shape and bool((other * self.now).sum() >= 0.99 * other.norm() * self.now.norm())

    def times(self, factor: float, now: Tensor) -> _Sum:
        return self._replace(now=now, exact=self.exact * factor, squares=self.squares * factor**2)

    def plus(self, other: _Sum, now: Tensor, where: str = "") -> _Sum:
        exact, squares = self.exact + other.exact, self.squares + other.squares
        return _Sum(now, exact, self.passes + other.passes, squares, self.dtype, where)


def _one(now: Tensor, dtype: torch.dtype, passes: int = 1) -> _Sum:
    return _Sum(now, now, passes, now.square(), dtype)


@dataclass
class _Total:
    """Of all steps: the squares of what sums are off by, of the sums and of their noise; the most passes of one."""

    dtype: torch.dtype
    error: float = 0.0
    size: float = 0.0
    noise: float = 0.0
    most: int = 0

    def count(self, made: _Sum) -> None:
        self.most = max(self.most, made.passes)
        self.error += float((made.now - made.exact).square().sum())
        self.size += float(made.exact.square().sum())
        self.noise += made.noise


class Sums(Look):
    """Adds up in FP32 the gradients that are added up in low precision."""

    stages = ("backward", "forward")

    def __init__(self) -> None:
        # Of one iteration: sums of `backward`, by the identity of a parameter; and by the address and the number of
        # their elements, results of backward passes, with None, and sums that are made of them by hand.
        self._sums: dict[int, _Sum] = {}
        self._by_hand: dict[tuple[int, int], tuple[StorageWeakRef, _Sum | None]] = {}
        self._before: list[Tensor] = []  # what the op that runs writes to, as it was
        self._iteration = 0
        self._totals: dict[str, _Total] = {}  # by the line that adds

    def called(self, func: Any, args: tuple, kwargs: dict) -> None:
        self._before = []
        if self._by_hand and func.__name__ in _IN_PLACE:
            with unwatched([]):  # of what nobody can read nothing is said
                kept, added = args[:2] if isinstance(args[0], list | tuple) else (args[:1], args[1:2])
                parts = [held_here(each) for each in kept]
                if all(_numbers(held_here(each)) in self._by_hand for each in added) and all(map(has_numbers, parts)):
                    self._before = [_flat(each).clone() for each in parts]

    def see(self, notes: Notes, op: OpCall) -> None:
        self._turn_to(notes.iteration)
        is_of_engine = op.stage == "backward" and not is_of_hook(op.frame)
        variable = getattr(op.node, "variable", None)  # of the node that adds to a gradient
        if not is_of_engine or variable is None:
            if op.stage == "backward" and (is_of_engine or not op.graphed) and not op.schema.written:
                for each in op.results:
                    self._put(each, None)
            if self._by_hand and (op.stage == "forward" or variable is not None):
                self._follow(notes, op)
            return
        before = _flat(op.before[0]) if op.before else None
        if op.name != "add_" or before is None or len(op.given) < 2 or not before.any():
            self._sums.pop(id(variable), None)  # another sum begins
        else:
            dtype = op.given[0].dtype
            known = self._sums.get(id(variable), _one(before, dtype))
            self._sums[id(variable)] = known.plus(_one(_flat(op.given[1]), dtype), _flat(op.given[0]))

    def _turn_to(self, iteration: int) -> None:
        if iteration != self._iteration:
            self._iteration = iteration
            self._sums.clear()
            self._by_hand.clear()

    def _follow(self, notes: Notes, op: OpCall) -> None:
        """Follow gradients through the program's own lines."""
        name = op.name.removeprefix("_foreach_").removesuffix("_")
        if name not in ("add", "copy") and (name not in _KEEPING or op.schema.written):
            return  # a sum that a line scales in place keeps its direction, too
        for i, row in enumerate(rows(op)):
            given, out, made = row.given, row.out, None
            if name == "add" and len(given) > 1 and given[0].numel() == given[1].numel() == out.numel():
                before = self._before[i] if op.schema.written and i < len(self._before) else _flat(given[0])
                made = self._added(out, self._part(given[0], before), self._part(given[1]), before, row.kwargs)
                made = made and made._replace(where=notes.place(op.frame).script)
            elif name in _KEEPING and given and (known := self._part(given[-1 if name == "copy" else 0])) is not None:
                if known.passes < 2:
                    self._put(out, None)
                    continue
                now = _flat(out)
                made = known.times(float(now @ known.now / known.now.square().sum()), now)
            if made is not None:
                self._put(out, made)
            elif op.schema.written:
                self._by_hand.pop(_numbers(out), None)

    def _put(self, tensor: Tensor, made: _Sum | None) -> None:
        self._by_hand[_numbers(tensor)] = StorageWeakRef(tensor.untyped_storage()), made

    def _part(self, tensor: Tensor, now: Tensor | None = None) -> _Sum | None:
        """Return a gradient or a sum of some; None if a tensor is neither, or has other numbers by now."""
        held, made = self._by_hand.get(_numbers(tensor), (None, None))
        now = _flat(tensor) if now is None else now
        if held is None or held.expired() or (made is not None and not torch.equal(made.now, now)):
            return None
        return made or _one(now, tensor.dtype)

    @staticmethod
    def _added(out: Tensor, known: _Sum | None, more: _Sum | None, before: Tensor, kwargs: dict) -> _Sum | None:
        if out.dtype not in LOW or more is None:
            return None
        if known is None:
            if before.any():
                return None  # which is no gradient
            known = _one(before, out.dtype, passes=0)
        factor = kwargs.get("alpha", 1)
        return known.plus(more.times(factor, more.now), _flat(out))._replace(dtype=out.dtype)

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Count what the gradients are off by. Clipping leaves their direction; a sum that was thrown away is none."""
        self._turn_to(iteration)
        for p in parameters(optimizer):
            if type(p.grad) is not Tensor or p.grad.layout is not torch.strided:
                continue
            _, by_hand = self._by_hand.get(_numbers(held_here(p.grad)), (None, None))
            made = self._sums.pop(id(p), None) or by_hand
            if made is not None and made.passes > (2 if made.where else 1) and made.is_along(_flat(p.grad)):
                self._totals.setdefault(made.where, _Total(made.dtype)).count(made)

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        for where, total in self._totals.items():
            if not total.size:
                continue
            error = (total.error / total.size) ** 0.5
            of_noise = (total.error / max(total.noise, 1e-12 * total.size)) ** 0.5
            said = f"gradients of {total.most} backward passes are "
            said += f"{'added up by hand' if where else 'accumulated'} in {dtype_name(total.dtype)}, and are "
            said += f"off by {percent(error)}, {min(of_noise, 1e6):.2g} of the noise between batches"
            do = "hmpx.attach(optimizer, use_fp32_grad_acc=True) accumulates in float32"
            recipe = {"use_fp32_grad_acc": True}
            if where:  # which no recipe reaches
                do = "add up in float32, as in torch.zeros_like(p, dtype=torch.float32), and cast the sum once"
                recipe = {}
            wrong, weight = error > 0.01 and of_noise > _FELT, min(0.2 + error, 0.8)
            yield Finding("gradient accumulation", wrong, said, do, where, weight=weight, recipe=recipe)


def _flat(tensor: Tensor) -> Tensor:
    return sampled(tensor).float().flatten()


def _numbers(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
