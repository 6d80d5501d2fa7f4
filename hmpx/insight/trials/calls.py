"""The call sites of a run, how one of their calls is computed in a precision, and the decisions that a call makes.

**Decisions** are results that a program reads off numbers and that are no numbers: an index, an order, a mask. A small
error changes none, and a larger one changes it at once: a router sends a token to another expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hmpx.base import run_in_region
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import graph_task, in_torch_func, tree_leaves, tree_map_only
from hmpx.conversion import installed
from hmpx.insight.finding import in_a_line, reason_of_call
from hmpx.insight.report import dtype_steps
from hmpx.insight.tensors import LOW, Tensor, differentiable, dtypes, floating, memory
from hmpx.ops.wrapping.observing import EntryPoint, Run, Seen, unobserved
from hmpx.ops.wrapping.overriding import call
from hmpx.ops.wrapping.rules import METHODS, TARGETS

_STEPS = frozenset("round floor ceil trunc sign heaviside floor_divide bernoulli".split())  # decisions as floats


@dataclass(eq=False)
class RunSite:
    """One site of a trial: an op, a line, a module.

    What is behind the module is noted in the run under the lists. dtypes: what came in, what the op ran on, what came
    out. calls: how many there were. is_low: whether it computes in low precision. saw: by the number of a call, the
    dtypes of its floating inputs as the op saw them. decided, changed: how many decisions there were, and how many of
    them the lists change. wrong: batch and order of the first call whose result is finite in FP32 only. largest: the
    largest magnitude that FP32 has there. raised: the error that the op raises under the lists, in a line; it runs in
    FP32 then.
    """

    op: str
    where: str
    module: str
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    calls: int = 0
    is_low: bool = False
    saw: dict[tuple[int, int], tuple[torch.dtype, ...]] = field(default_factory=dict)
    decided: int = 0
    changed: int = 0
    wrong: tuple[int, int] | None = None
    largest: float = 0.0
    raised: str = ""

    def __str__(self) -> str:
        return f"{self.op} in {self.module}, {self.where}" if self.module else f"{self.op}, {self.where}"


class Asked(NamedTuple):
    """One call that a run is asked for.

    number: the batch, and which call of its site it is there; None where a checkpoint repeats a call.
    """

    site: RunSite
    number: tuple[int, int] | None
    point: EntryPoint
    run: Run
    args: tuple
    kwargs: dict

    def plainly(self) -> Seen:
        return self.run(*self.args, **self.kwargs)

    def answer(self, result: Any) -> Seen:
        return Seen(self.args, self.kwargs, result, False, 0.0, 0.0)


Compute = Callable[[Asked], Seen]  # computes a call in the precision that a run gives it


def compute_in_fp32(asked: Asked) -> Seen:
    with unobserved():
        return asked.answer(in_fp32(asked))


def compute_uncast(asked: Asked) -> Seen:
    """Compute a call as torch does, without casts."""
    with unobserved():
        return asked.answer(call(asked.point.original, asked.args, asked.kwargs))


def compute_as_listed(asked: Asked) -> Seen:
    """Compute a call as the lists say; in FP32 where that raises and FP32 does not, which its site notes."""
    try:
        return asked.plainly()
    except Exception as error:
        if is_recomputing() and not asked.site.raised:  # a checkpoint that has what it wants says so by an error
            raise
        try:
            seen = compute_in_fp32(asked)
        except Exception:  # it is not the lists that make it raise
            raise error from None
        if not asked.site.raised:
            asked.site.raised, conversion = in_a_line(error), installed()
            if conversion is not None:
                policy = conversion.policy_here
                asked.site.reason = reason_of_call(asked.point, seen._replace(casting=True), policy)
        return seen


def compute_in_low(asked: Asked) -> Seen:
    """Compute a call on inputs of the dtypes that its op saw under the lists, while other ops run in FP32."""
    saw = asked.site.saw.get(asked.number or (-1, -1)) or next(iter(asked.site.saw.values()), ())
    if len(saw) != len(floating((asked.args, asked.kwargs))):
        return asked.plainly()
    with unobserved():
        args, kwargs = _in_dtypes(asked, saw)
        if asked.point.in_place:  # in low precision it writes to a copy, and the result is copied back in FP32
            args = (args[0].clone(), *args[1:])
    with run_in_region.region(True):
        result = asked.run(*args, **kwargs).result
    with unobserved():
        return asked.answer(asked.args[0].copy_(result) if asked.point.in_place else result)


def by_site(compute_of: Callable[[RunSite], Compute]) -> Compute:
    """Return what computes each call as `compute_of` says of its site."""
    return lambda asked: compute_of(asked.site)(asked)


def is_recomputing() -> bool:
    """Return whether a backward pass is running: a checkpoint then repeats calls of the forward pass."""
    return graph_task() != -1


def is_transformed() -> bool:
    """Return whether torch.func transforms the call: a tensor then stands for several, and cannot be read."""
    return in_torch_func() is not None


def in_fp32(asked: Asked) -> Any:
    """Compute a call in FP32: widen its inputs, except one that it writes to. A cast by hand to less is left out."""
    point = asked.point
    if point.in_place:
        return call(point.original, (*asked.args[:1], *_widened(asked.args[1:])), _widened(asked.kwargs))
    args, kwargs = _widened(asked.args), _widened(asked.kwargs)
    result = call(point.original, args, kwargs)
    if point.op == "to" and isinstance(result, Tensor) and result.dtype in LOW:
        return args[0].to(result.device)
    return result


def _widened(value: Any) -> Any:
    return tree_map_only(Tensor, lambda each: METHODS[torch.float32](each) if each.dtype in LOW else each, value)


def _in_dtypes(asked: Asked, dtypes: tuple[torch.dtype, ...]) -> tuple[tuple, dict]:
    rest = iter(dtypes)

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        dtype = next(rest, tensor.dtype)
        return tensor if dtype is tensor.dtype else METHODS[dtype](tensor) if dtype in METHODS else tensor.to(dtype)

    return tree_map_only(Tensor, cast, (asked.args, asked.kwargs))


def decisions_in(asked: Asked, result: Any) -> list[Tensor]:
    """Return copies of the decisions among the results of a call; none if no floating tensor came in."""
    if is_transformed() or "out" in asked.kwargs or not floating((asked.args, asked.kwargs)):
        return []
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf.detach().clone() for leaf in found if asked.point.op in _STEPS or not differentiable(leaf.dtype)]


def differing(before: list[Tensor], after: list[Tensor]) -> int:
    """Count the decisions that differ; all of them count if their number differs."""
    pairs = zip(before, after, strict=False)
    return sum(int((a != b).sum()) if a.shape == b.shape else max(a.numel(), b.numel()) for a, b in pairs)


class Exact(NamedTuple):
    """What is kept of a call in FP32: whether its result is finite, its largest magnitude, its decisions."""

    is_finite: bool
    largest: float
    decisions: list[Tensor]


class BothWays:
    """Computes the calls of a batch in FP32 (`exact`), then under the lists (`listed`), and tells their sites."""

    def __init__(self) -> None:
        self._exact: dict[tuple, Exact] = {}  # by site and number
        self._made: dict[int, RunSite] = {}  # by memory, the site that made what is in it last
        self._order = 0

    def exact(self, asked: Asked) -> Seen:
        seen = compute_in_fp32(asked)
        if asked.number is not None:
            with unobserved():
                results = _readable(seen.result)
                largest = max((float(each.abs().max()) for each in results), default=0.0)
                self._exact[asked.site, asked.number] = Exact(
                    all_finite(results), largest, decisions_in(asked, seen.result)
                )
        return seen

    def listed(self, asked: Asked) -> Seen:
        """Compute a call as the lists say, or in FP32 where it raises."""
        raised = asked.site.raised
        seen = compute_as_listed(asked)
        if asked.number is not None:
            with unobserved():
                if asked.site.raised and not raised:
                    self._name_the_maker(asked)
                self._note(asked, seen)
        return seen

    def _note(self, asked: Asked, seen: Seen) -> None:
        site, (batch, _) = asked.site, asked.number or (0, 0)
        given, saw, results = (floating(each) for each in ((asked.args, asked.kwargs), seen[:2], (seen.result,)))
        if not given and not results:
            return
        self._order += 1
        site.calls += 1
        site.saw[asked.number or (0, 0)] = tuple(tensor.dtype for tensor in saw)
        # An op that torch promotes, or a cast by hand to FP32, gets inputs in low precision and computes in FP32.
        follows = not seen.casting or asked.point.rule not in TARGETS
        is_low = bool(dtypes(results) & LOW) or (not follows and bool(dtypes(saw) & LOW))
        site.is_low = (site.is_low or is_low) and not site.raised
        if not site.dtypes:
            site.dtypes = dtype_steps(
                *([dtype_name(tensor.dtype) for tensor in step] for step in (given, saw, results))
            )
            site.rule = str(asked.point.rule) if asked.point.rule is not None and seen.casting else ""
            if not site.reason and (conversion := installed()) is not None:
                site.reason = reason_of_call(asked.point, seen, conversion.policy_here)
        exact = self._exact.get((site, asked.number))
        if exact is not None:
            if exact.is_finite and site.wrong is None and not all_finite(_readable(seen.result)):
                site.wrong, site.largest = (batch, self._order), exact.largest
            site.decided += sum(each.numel() for each in exact.decisions)
            site.changed += differing(exact.decisions, decisions_in(asked, seen.result))
        if not is_transformed():
            self._made |= dict.fromkeys(map(memory, results), site)

    def _name_the_maker(self, asked: Asked) -> None:
        """Add to the reason of a site that raises, and whose inputs decide its dtype, which op has made them."""
        if asked.point.rule in TARGETS or is_transformed():
            return
        low = [tensor for tensor in floating((asked.args, asked.kwargs)) if tensor.dtype in LOW]
        maker = next((self._made.get(memory(tensor)) for tensor in low), None)
        if maker is not None:
            asked.site.reason += f"; its input is that of {maker.op} at {maker.where} ({maker.reason})"


def _readable(result: object) -> list[Tensor]:
    """Return the floating tensors of a result; none inside torch.func, where a tensor stands for several."""
    if is_transformed():
        return []
    return [tensor.detach() for tensor in floating((result,)) if tensor.numel() and tensor.layout is torch.strided]


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors if tensor is not None)
