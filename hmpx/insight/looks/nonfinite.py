"""The first inf or NaN: in a step, and the op that has made it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hmpx.base.torch_private import norms_of
from hmpx.insight.capture.dispatch import Look
from hmpx.insight.capture.notes import Notes, OpCall, Spot
from hmpx.insight.finding import Names, Problem, asked
from hmpx.insight.looks.evidence import overflow
from hmpx.insight.tensors import LOW, Tensor, is_finite, is_masked, sample
from hmpx.ops.policies.catalog import catalog
from hmpx.updates.stepping.names import parameters
from hmpx.updates.stepping.released import Released

_UNMADE = frozenset("empty empty_like empty_strided new_empty new_empty_strided resize_".split())


class _Path(NamedTuple):
    """How numbers of one iteration become inf and NaN.

    maker: made the first inf, or a NaN, of finite numbers. nan: made a NaN of finite numbers, or of an inf. given: read
    the first of which no op that was looked at is the maker. Of constants that are inf, as in masks, only a NaN tells.
    """

    iteration: int
    maker: Spot | None = None
    nan: Spot | None = None
    given: Spot | None = None


class Nonfinite(Look):
    """Follows inf and NaN from the op that makes the first of finite numbers to gradients and weights.

    An inf alone harms nothing before a NaN is made of it, or before it reaches a gradient; a NaN that reaches none is a
    note. What autograd looks at has a path of its own: metrics may be NaN.
    """

    stages = ("forward", "backward", "step")

    def __init__(self) -> None:
        self._paths = {True: _Path(0), False: _Path(0)}  # by whether autograd looks at the ops
        self._harmless: _Path | None = None  # the first with a NaN that has reached no gradient
        self._reached: tuple[str, int, str] | None = None  # weights or gradients, the iteration, the line of the step
        self._lines: dict[int, str] = {}
        self._looked: set[int] = set()
        self._now = self._passed = 0  # the iteration of this step, and of the last whose gradients were finite

    def see(self, notes: Notes, op: OpCall) -> None:
        self._looked.add(notes.iteration)
        path = self._paths[op.is_of_model]
        is_known = path.nan is not None and (path.iteration == notes.iteration or path.iteration > self._passed)
        if op.is_view or op.name in _UNMADE or self._reached is not None or is_known:
            return
        bad = op.nonfinite
        if bad is None or any(map(math.isinf, op.scalars)):
            return
        if path.iteration != notes.iteration:
            self._harmless = self._harmless or (path if path.nan is not None else None)
            path = _Path(notes.iteration)
        makes_nan, odd = bool(bad.isnan().any()), [each for each in op.given if each.numel() and not is_finite(each)]
        is_given_nan = any(bool(each.isnan().any()) for each in odd)
        if not odd:
            made = bad[~torch.isfinite(bad)]
            masked = overflow(op, notes) is not None or is_masked(op.name.rstrip("_"), op.given, made)
            if masked and op.stage != "backward":
                return
        if is_given_nan or (odd and not makes_nan):
            if path.maker is None and (path.given is None or (is_given_nan and not path.given.numbers["nan"])):
                path = path._replace(given=self._note(notes, op, is_given_nan))
        elif makes_nan or path.maker is None:
            spot = self._note(notes, op, makes_nan, of_inf=bool(odd))
            maker = path.maker or (None if odd else spot)
            path = path._replace(maker=maker, nan=spot if makes_nan else None)
        self._paths[op.is_of_model] = path

    def _note(self, notes: Notes, op: OpCall, is_nan: bool, of_inf: bool = False) -> Spot:
        """Note the op, at the line of the forward op where autograd runs it."""
        stages = {"forward": "forward", "step": "in the step"}
        said = stages.get(op.stage) or f"in the backward pass ({op.node.name()})"
        numbers = {"nan": is_nan, "backward": op.stage == "backward", "low": op.out.dtype in LOW}
        numbers["of_inf"] = of_inf
        place, forward = notes.forward_of(op.node)
        spot = notes.note_line(f"nonfinite in {notes.iteration}", op.name, op.frame, said, place, **numbers)
        spot.forward = forward
        spot.made_by.update(made for each in op.given if (made := notes.facts(each).get("rounded")))
        return spot

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._lines[id(optimizer)] = where

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if not bool(getattr(optimizer, "found_inf", None)):
            grads = [p.grad for p in _few(optimizer) if p.grad is not None and type(p.grad) is not Released]
            self._now = iteration
            self._reach("gradients", grads, optimizer, iteration)
            if grads and self._reached is None:
                self._passed = iteration

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        self._reach("weights", _few(optimizer), optimizer, self._now)

    def _reach(self, what: str, tensors: Sequence[Tensor], optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if self._reached is None and not _are_finite(tensors):
            self._reached = what, iteration, self._lines[id(optimizer)]

    @property
    def _path(self) -> _Path:
        """What tells most: ops beside the model, as of its data, where one that it looks at is given what they made."""
        of_model, beside = self._paths[True], self._paths[False]
        is_of_model = of_model.maker or of_model.nan or not beside.nan or (self._reached and not of_model.given)
        return of_model if is_of_model else beside

    @property
    def first(self) -> Spot | None:
        """The op that makes the first inf or NaN of finite numbers."""
        return self._path.maker or self._path.nan

    def findings(self, notes: Notes, names: Names) -> Iterator[Problem]:
        what, iteration, where = self._reached or ("", 0, "")
        path, when = self._path, f"{what} are inf or NaN in step {iteration}"
        harms = self._reached is not None or path.iteration > self._passed
        cause = path.maker or path.nan if harms and (path.nan or path.iteration == iteration) else None
        if cause is not None and not (notes.skipped and cause.numbers["backward"]):  # so a GradScaler finds its scale
            yield _made(cause, path.nan, what and f"; {what} are inf or NaN from step {iteration} on")
        elif self._reached is not None and path.iteration == iteration and path.given is not None:
            given = path.given
            said = f"{given.name} is given {'a NaN' if given.numbers['nan'] else 'an inf'} that no op has made, "
            do = "look where these numbers come from: in the data of this step, or in weights"
            yield Problem(
                "inf or NaN", True, f"{said}{given.said}; {when}", do, given.where, ops=(given.name,), weight=0.9
            )
        elif self._reached is not None and iteration in self._looked:
            said = f"{when}, and no op that was looked at made the first"
            do = "torch.autograd.set_detect_anomaly(True) names the op of the forward pass"
            yield Problem("inf or NaN", True, said, do, where, weight=0.9)
        elif self._reached is not None:
            said = when if what == "gradients" else f"weights are inf or NaN from step {iteration} on"
            do = asked(f"--at {iteration}", f"hmpx.doctor(at=[{iteration}])")
            do += " looks at every op of that step and names the first"
            yield Problem("inf or NaN", True, said, do, where, weight=1.0 if what == "weights" else 0.9)
        elif (path := self._harmless or path).nan is not None and not (notes.skipped and path.nan.numbers["backward"]):
            yield _made(path.maker or path.nan, path.nan, "; no gradient is inf or NaN in that step", False)


def _made(maker: Spot, nan: Spot | None, rest: str, wrong: bool = True) -> Problem:
    what = "a NaN" if maker.numbers["nan"] else "an inf"
    of = "an inf that the script itself has set, as in a mask" if maker.numbers["of_inf"] else "finite numbers"
    said = f"{maker.name} is the first op that makes {what} of {of}, {maker.said}{maker.place.within}"
    said += f", in {maker.module}" if maker.module else ""
    if nan is not None and nan is not maker:
        said += f"; {nan.name} makes a NaN of it, {nan.said}"
    makers = sorted({name for name, _ in maker.made_by})
    do = "compute it in float32" if maker.numbers["low"] else "keep its input away from where it is not defined"
    do = f"compute it and the {' and '.join(makers)} that it is of, which has rounded it, in float32" if makers else do
    is_listed = makers and not maker.numbers["backward"] and maker.name in catalog()
    recipe = {"fp32": sorted({maker.name, *makers})} if is_listed else {}
    modules = (maker.module,) if maker.module else ()
    weight = 0.97 if wrong else 0.05
    return Problem("inf or NaN", wrong, said + rest, do, maker.where, modules, (maker.name,), weight, recipe)


def _few(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the smallest parameters: NaN spreads to all."""
    return sorted((p for p in parameters(optimizer) if p.requires_grad), key=lambda p: p.numel())[:8]


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    dense = [few.float() for each in tensors if each.layout is torch.strided and (few := sample(each)).numel()]
    return not dense or all(map(math.isfinite, norms_of(dense, math.inf)))
