"""What is lost where the gradients of several backward passes are added up in low precision.

`backward` adds to what ``.grad`` holds. A program may do it by hand, in ``.grad`` or in buffers of its own; such a sum
counts once it is the gradient of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import Look, is_of_hook, sampled, unwatched
from hmpx.insight.finding import Finding, Names, percent
from hmpx.insight.looks.writes import rows
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.tensors import LOW, Tensor, held_here
from hmpx.updates.stepping.names import parameters

_FELT = 0.1  # of the noise between batches: from here on a loss shows it
_IN_PLACE = (torch.ops.aten.add_.Tensor, torch.ops.aten._foreach_add_.List)
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
        if self._by_hand and func in _IN_PLACE:
            with unwatched([]):  # of what nobody can read nothing is said
                self._before = [_flat(each).clone() for each in (args[0] if isinstance(args[0], list) else args[:1])]

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
