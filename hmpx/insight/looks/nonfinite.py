"""The first inf or NaN: in a step, and the op that has made it.

A cure is tried: the op again in FP32, then with the ops that have rounded its input. The inputs of an iteration's last
calls are kept for that, up to `_KEPT` bytes of them.
"""

from __future__ import annotations

import linecache
import math
import re
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from hmpx.base.tensors import dtype_name, tensors_in
from hmpx.base.torch_private import LINES, norms_of, version_of
from hmpx.insight.dispatch import Look
from hmpx.insight.finding import Finding, Names, asked, first_names
from hmpx.insight.looks.checks import overflow
from hmpx.insight.notes import NotedSite, Notes, OpCall, own_frame
from hmpx.insight.report import number
from hmpx.insight.tensors import (
    LOW,
    Tensor,
    View,
    called_in_fp32,
    has_numbers,
    held_here,
    is_finite,
    is_masked,
    view_of,
)
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.policies.composition import callers
from hmpx.ops.wrapping.overriding import PLAIN
from hmpx.updates.stepping.names import parameters, trained
from hmpx.updates.stepping.released import Released

_ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "pow")  # a NaN in these is no mask that the program writes
_FEW = 8  # weights that are looked at after each step, the smallest; all are at the end
_UNMADE = frozenset("empty empty_like empty_strided new_empty new_empty_strided resize_".split())


class _Path(NamedTuple):
    """How numbers of one iteration become inf and NaN.

    maker: made the first inf, or a NaN, of finite numbers. nan: made a NaN of finite numbers, or of an inf. given: read
    the first of which no op that was looked at is the maker. Of constants that are inf, as in masks, only a NaN tells.
    """

    iteration: int
    maker: NotedSite | None = None
    nan: NotedSite | None = None
    given: NotedSite | None = None


class Nonfinite(Look):
    """Follows inf and NaN from the op that makes the first of finite numbers to gradients and weights.

    An inf alone harms nothing before a NaN is made of it, or before it reaches a gradient; a NaN that reaches none is a
    note. What autograd looks at has a path of its own: metrics may be NaN.
    """

    stages = ("forward", "backward", "step")

    def __init__(self) -> None:
        self._calls = Calls()
        self._tried: dict[NotedSite, RepeatableCall | None] = {}  # what is to be tried
        self._cures: dict[NotedSite, Any] = {}  # what was tried
        self._losses: list[int] = []  # iterations with a loss that is inf or NaN, of which no GradScaler skips the step
        self._odd = 0  # the last iteration with such a loss
        self._written = 0  # the iteration in which the program itself has written inf or NaN
        self._where: list[Any] = []  # the parameters whose gradients or numbers were the first
        self._sound = False  # whether this step has finite gradients, and finite weights where few are looked at
        self._maker = self._eps = ""  # the optimizer whose step has made inf or NaN of these, and its eps, if it is 0
        self._paths = {True: _Path(0), False: _Path(0)}  # by whether autograd looks at the ops
        self._harmless: _Path | None = None  # the first with a NaN that has reached no gradient
        self._reached: tuple[str, int, str] | None = None  # weights or gradients, the iteration, the line of the step
        self._lines: dict[int, str] = {}
        self._looked: set[int] = set()
        self._now = self._passed = 0  # the iteration of this step, and of the last whose gradients were finite

    def see(self, notes: Notes, op: OpCall) -> None:
        self._looked.add(notes.iteration)
        if op.stage == "forward":
            self._calls.keep(op, notes.node if op.is_of_model else None)
        path = self._paths[op.is_of_model]
        is_known = path.nan is not None and (path.iteration == notes.iteration or path.iteration > self._passed)
        if op.is_view or op.name in _UNMADE or self._reached is not None or is_known:
            return
        bad = op.nonfinite
        if bad is None and self._written != notes.iteration:
            return
        is_computed = op.name.strip("_") in _ARITHMETIC and any(map(math.isnan, op.scalars))
        if (not all(map(math.isfinite, op.scalars)) and not is_computed) or op.is_outside_model:
            self._written = notes.iteration if bad is not None else self._written
            return
        hidden = self._written == notes.iteration and any(notes.facts(each).get("of_nan") for each in op.given)
        if bad is None or hidden:
            if self._written == notes.iteration and (hidden or not all(is_finite(each) for each in op.given)):
                for each in op.results:  # such as the sum of `nanmean`, which leaves NaN out
                    notes.add(each, of_nan=True)
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
            site = self._note(notes, op, makes_nan, of_inf=bool(odd))
            maker = path.maker or (None if odd else site)
            path = path._replace(maker=maker, nan=site if makes_nan else None)
        self._paths[op.is_of_model] = path

    def _note(self, notes: Notes, op: OpCall, is_nan: bool, of_inf: bool = False) -> NotedSite:
        """Note the op, at the line of the forward op where autograd runs it."""
        stages = {"forward": "forward", "step": "in the step"}
        said = stages.get(op.stage) or f"in the backward pass ({op.node.name()})"
        numbers = {"nan": is_nan, "backward": op.stage == "backward", "low": op.out.dtype in LOW}
        numbers["of_inf"] = of_inf
        place, forward = notes.forward_of(op.node)
        site = notes.note_line(f"nonfinite in {notes.iteration}", op.name, op.frame, said, place, **numbers)
        site.forward = forward
        self._tried[site] = self._calls.of(op)
        return site

    def _try(self) -> None:
        """Try what cures the first inf or NaN, while what it was made of is as it was."""
        for site, call in self._tried.items():
            if site not in self._cures and site in (self._path.maker, self._path.nan):
                self._cures[site] = call and self._calls.cure(call, bool(site.numbers["backward"]))
        self._tried.clear()

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        self._lines[id(optimizer)] = where

    def loss(self, notes: Notes, losses: Sequence[Tensor]) -> None:
        if not all(is_finite(each) for each in losses):
            self._odd = notes.iteration
            self._losses += [] if notes.skipped else [notes.iteration]

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        self._try()
        self._sound = False
        if not bool(getattr(optimizer, "found_inf", None)):
            grads = {p: p.grad for p in parameters(optimizer) if not isinstance(p.grad, Released | None)}
            self._now = iteration
            self._losses += [iteration] if self._odd == iteration and iteration not in self._losses[-1:] else []
            self._reach("gradients", grads, optimizer, iteration)
            if grads and self._reached is None:
                self._passed = iteration
                self._sound = not _not_finite(_few(optimizer))

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        self._reach("weights", _few(optimizer), optimizer, self._now)
        if self._sound and self._reached is not None and not self._maker:
            self._maker, self._eps = type(optimizer).__name__, _zero_eps(optimizer, {*map(id, self._where)})

    def over(self) -> None:
        self._try()
        self._calls.clear()

    def close(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Look at all weights: what a step makes in a row of one of them spreads to no other."""
        for each in optimizers:
            self._reach("weights", {p: p for p in parameters(each)}, each, self._now)

    def _reach(self, what: str, tensors: Mapping[Any, Tensor], optimizer: Any, iteration: int) -> None:
        if self._reached is None and (names := _not_finite(tensors)):
            self._reached, self._where = (what, iteration, self._lines[id(optimizer)]), names

    @property
    def _path(self) -> _Path:
        """What tells most: ops outside of the model, as of its data, where one inside is given what they made."""
        of_model, outside = self._paths[True], self._paths[False]
        is_of_model = of_model.maker or of_model.nan or not outside.nan or (self._reached and not of_model.given)
        return of_model if is_of_model else outside

    @property
    def first(self) -> NotedSite | None:
        """The op that makes the first inf or NaN of finite numbers."""
        return self._path.maker or self._path.nan

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        what, iteration, where = self._reached or ("", 0, "")
        path = self._path
        if 0 < len(self._where) < len(names):
            what += f" ({first_names(tuple(names[p] for p in self._where if p in names))})"
        when = f"{what} are inf or NaN in step {iteration}"
        of_loss = path.iteration in self._losses
        harms = self._reached is not None or path.iteration > self._passed or of_loss
        is_cause = path.nan or path.iteration == iteration or of_loss
        cause = path.maker or path.nan if harms and is_cause else None
        if cause is not None and not (notes.skipped and cause.numbers["backward"]):  # so a GradScaler finds its scale
            rest = what and f"; {what} are inf or NaN from step {iteration} on"
            yield self._made(cause, path.nan, rest or ("; so is the loss" if of_loss else ""))
        elif self._reached is not None and path.iteration == iteration and path.given is not None:
            given = path.given
            said = f"{given.name} is given {'a NaN' if given.numbers['nan'] else 'an inf'} that no op has made, "
            do = "look where these numbers come from: in the data of this step, or in weights"
            yield Finding(
                "inf or NaN", True, f"{said}{given.said}; {when}", do, given.where, ops=(given.name,), weight=0.9
            )
        elif self._maker:
            said = f"{when}, whose gradients are finite: they are made by {self._maker}{self._eps}"
            do = "keep the weights in float32, where it is not 0" if self._eps else "look at its rate and its state"
            recipe = {"parameter_dtype": "float32"} if self._eps else {}
            yield Finding("inf or NaN", True, said, do, where, weight=0.97, recipe=recipe)
        elif self._reached is not None and iteration in self._looked:
            said = f"{when}, and no op that was looked at made the first"
            do = "torch.autograd.set_detect_anomaly(True) names the op of the forward pass"
            yield Finding("inf or NaN", True, said, do, where, weight=0.9)
        elif self._reached is not None:
            is_gradient = what.startswith("gradients")
            said = when if is_gradient else f"{what} are inf or NaN from step {iteration} on"
            do = asked(f"--at {iteration}", f"hmpx.doctor(at=[{iteration}])")
            do += " looks at every op of that step and names the first"
            yield Finding("inf or NaN", True, said, do, where, weight=0.9 if is_gradient else 1.0)
        elif (path := self._harmless or path).nan is not None and not (notes.skipped and path.nan.numbers["backward"]):
            yield self._made(path.maker or path.nan, path.nan, "; no gradient is inf or NaN in that step", False)
        elif self._losses:
            steps = f"{number(len(self._losses), 'iteration')}, first in iteration {self._losses[0]}"
            do = asked(f"--at {self._losses[0]}", f"hmpx.doctor(at=[{self._losses[0]}])")
            do += " looks at every op of that step"
            yield Finding("inf or NaN", True, f"the loss is inf or NaN in {steps}", do, weight=0.9)

    def _made(self, maker: NotedSite, nan: NotedSite | None, rest: str, wrong: bool = True) -> Finding:
        finding, cure = _made(maker, nan, rest, wrong), self._cures.get(maker)
        if not maker.numbers["low"] and not (cure and cure[1]):  # in FP32 it is as it is
            return finding
        listed, rounded = cure or ((), ())
        of = f" and the {' and '.join(rounded)} that it is of" if rounded else ""
        what = f"compute it{of} in float32"
        if cure is None:
            do = f"{what} (not tried: what it was made of is gone)"
        elif not listed:
            do = f"{finding.do}: in float32, with up to four ops before it, it is not finite either"
        else:
            do = f"{what}: so it is finite, as was tried"
        return replace(finding, do=do, recipe={"fp32": sorted(listed)} if listed else {})


def _made(maker: NotedSite, nan: NotedSite | None, rest: str, wrong: bool = True) -> Finding:
    what = "a NaN" if maker.numbers["nan"] else "an inf"
    of = "an inf that the script itself has set, as in a mask" if maker.numbers["of_inf"] else "finite numbers"
    said = f"{maker.name} is the first op that makes {what} of {of}, {maker.said}{maker.place.within}"
    said += f", in {maker.module}" if maker.module else ""
    if nan is not None and nan is not maker:
        said += f"; {nan.name} makes a NaN of it, {nan.said}"
    do = "keep its input away from where it is not defined"
    modules = (maker.module,) if maker.module else ()
    weight = 0.97 if wrong else 0.05
    return Finding("inf or NaN", wrong, said + rest, do, maker.where, modules, (maker.name,), weight)


def _zero_eps(optimizer: torch.optim.Optimizer, odd: set[int]) -> str:
    """Return, in words, an eps that is 0 in the dtype of one of these parameters and of its state; "" for none."""
    for p, eps in ((p, group.get("eps")) for group in optimizer.param_groups for p in group["params"] if id(p) in odd):
        held = {each.dtype for each in tensors_in((optimizer.state.get(p),)) if each.shape == p.shape}
        if eps and held == {p.dtype} and not torch.tensor(eps, dtype=p.dtype):
            return f", whose eps of {eps:g} is 0 in {dtype_name(p.dtype)}"
    return ""


def _few(optimizer: torch.optim.Optimizer) -> dict[Any, Tensor]:
    return {p: p for p in sorted(trained(optimizer), key=lambda p: p.numel())[:_FEW]}


def _numbers_of(tensor: Tensor) -> Tensor | None:
    """Return what this rank can read of a tensor's numbers; None for nothing."""
    part = tensor._values() if tensor.is_sparse else held_here(tensor).detach()
    is_plain = type(part) in PLAIN and part.layout is torch.strided and part.is_floating_point() and not part.is_meta
    return part if is_plain and part.numel() and has_numbers(part) else None


def _not_finite(tensors: Mapping[Any, Tensor]) -> list[Any]:
    """Return the keys of tensors with an inf or a NaN. A norm tells, unless it overflows."""
    dense = {key: part for key, each in tensors.items() if (part := _numbers_of(each)) is not None}
    if not dense:
        return []
    first, *others = norms_of([*dense.values()], 2)
    norms = torch.stack([each.to(first.device, torch.float32) for each in (first, *others)]).tolist()
    return [
        key for key, norm in zip(dense, norms, strict=True) if not math.isfinite(norm) and not is_finite(dense[key])
    ]


# The cure

_KEPT = 1 << 26  # bytes of inputs
_DEEP = 4  # ops behind one another that are computed in FP32, at most
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(eq=False)
class RepeatableCall:
    """A call of the forward pass that can be repeated, while its arguments are what they were.

    result: what it returned; key: where that lies. node: its number in autograd. size: of its arguments, in bytes.
    versions: of the tensors among these. line: of the innermost Python frame.
    """

    func: Any
    name: str
    args: tuple
    kwargs: dict[str, Any]
    result: weakref.ref[Tensor]
    key: View
    node: int | None
    size: int
    versions: list[int]
    line: tuple[str, int]

    @property
    def is_as_it_was(self) -> bool:
        return self.versions == [*map(version_of, tensors_in(self.args))]

    @property
    def names(self) -> tuple[str, ...]:
        """What lists call it: of the names that an op may have, those that the line has."""
        text, name = linecache.getline(*self.line), canonical(self.name.strip("_"))
        known = {each: catalog().get(each) for each in (name, *callers(self.name))}
        every = [each for each, op in known.items() if op is not None and op.computes]
        written = [each for each in every if re.search(rf"\b{each}\b", text) or (each == "matmul" and "@" in text)]
        return tuple(written or every)


class Calls:
    """The last calls of an iteration's forward pass."""

    def __init__(self) -> None:
        self._calls: deque[RepeatableCall] = deque()
        self._made: dict[View, RepeatableCall] = {}
        self._of_node: dict[int, RepeatableCall] = {}
        self._bytes = 0

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def keep(self, op: OpCall, node: int | None) -> None:
        """Keep a call, and forget the oldest ones."""
        if not op.results:
            return
        given, key = [*tensors_in(op.args)], view_of(op.out)
        size = sum(each.numel() * each.element_size() for each in given)
        if op.name.endswith("_") or "out" in op.kwargs or _RANDOM in op.func.tags or size > _KEPT:
            self._made.pop(key, None)
            return
        frame = own_frame(op.frame)
        line = frame.f_code.co_filename, frame.f_lineno
        versions = [version_of(each) for each in given]
        call = RepeatableCall(
            op.func, op.name, op.args, op.kwargs, weakref.ref(op.out), key, node, size, versions, line
        )
        self._calls.append(call)
        if not any(view_of(each) == key for each in given):
            self._made[key] = call
        if node is not None:
            self._of_node.setdefault(node, call)
        self._bytes += size
        while self._bytes > _KEPT:
            old = self._calls.popleft()
            self._bytes -= old.size
            if self._made.get(old.key) is old:
                del self._made[old.key]
            if old.node is not None and self._of_node.get(old.node) is old:
                del self._of_node[old.node]

    def of(self, op: OpCall) -> RepeatableCall | None:
        """Return a call of the forward pass: this op, or the one whose backward pass it is part of."""
        if op.node is None:
            return next((each for each in reversed(self._calls) if each.result() is op.out), None)
        return None if LINES.missing else self._of_node.get(op.node._sequence_nr())

    def cure(self, call: RepeatableCall, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the ops that must be in FP32 so that a call is finite, under their names in lists, and in words.

        First the call itself, then those that have rounded its input. Empty if nothing helps; None if it was not tried,
        since what it was given is gone.

        Args:
            backward: whether the gradient of the call is to be finite, too.
        """
        for depth in range(_DEEP + 1):
            last: dict[RepeatableCall, None] = {}
            try:
                with torch.random.fork_rng(devices=()), torch.set_grad_enabled(backward):
                    is_finite = self._is_finite(call, depth, last)
            except _Gone:
                return None if depth == 0 else ((), ())
            if is_finite:
                rounded = [each for each in last if each is not call]
                listed = dict.fromkeys(name for each in (call, *rounded) for name in each.names)
                return tuple(listed), tuple(dict.fromkeys(each.names[0] for each in rounded))
            if depth and not last:
                break
        return (), ()

    def _is_finite(self, call: RepeatableCall, depth: int, last: dict[RepeatableCall, None]) -> bool:
        given = [self._wide(each, depth, last).detach() for each in tensors_in(call.args) if each.is_floating_point()]
        for each in given if torch.is_grad_enabled() else ():
            each.requires_grad_(True)
        left = iter(given)
        made = _run(call, lambda each: next(left) if each.is_floating_point() else each)
        every = [each for each in tensors_in((made,)) if each.is_floating_point()]
        if torch.is_grad_enabled():
            seeds = [each for each in every if each.requires_grad]
            grads = torch.autograd.grad(seeds, given, [*map(torch.ones_like, seeds)], allow_unused=True)
            every += [each for each in grads if each is not None]
        return all(bool(each.isfinite().all()) for each in every)

    def _wide(self, tensor: Tensor, depth: int, last: dict[RepeatableCall, None]) -> Tensor:
        """Return a tensor with so many ops before it computed in FP32. last: gets the first of these."""
        made = self._made.get(view_of(tensor))
        if tensor.dtype not in LOW or made is None:
            return tensor.detach().float() if tensor.dtype in LOW else tensor.detach()
        if not made.is_as_it_was:
            raise _Gone
        is_cast = made.name == "_to_copy"
        if is_cast and made.args[0].dtype not in LOW:
            return made.args[0].detach()
        moves = is_cast or not made.names
        if not depth and not moves:
            return tensor.detach().float()
        if depth == 1 and not moves:
            last[made] = None
        return _run(made, lambda each: self._wide(each, depth - (not moves), last))


class _Gone(Exception):
    """What an op was given is no longer what it was."""


def _run(call: RepeatableCall, of: Any) -> Any:
    if not call.is_as_it_was:
        raise _Gone
    return called_in_fp32(call.func, call.args, call.kwargs, of)
