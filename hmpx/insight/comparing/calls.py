"""The call sites that `compare` meets, how a pass computes one of their calls, and the decisions that a call makes.

**Decisions** are results that a program reads off numbers and that are no numbers: an index, an order, a mask. A small
error changes none, and a larger one changes it at once: a router sends a token to another expert. A first-order
estimate does not see that. Worse, shifted weights change decisions too, and the jump is charged to the ops behind them.
So the pass at shifted weights repeats the decisions of the FP32 pass. Where the lists change a decision, that is
counted, and `trials` measures the ops before it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves

from hmpx.base import region_state
from hmpx.insight.comparing.noise import Distance
from hmpx.insight.module_names import ModuleNames
from hmpx.insight.reasons import in_a_line
from hmpx.insight.tensors import LOW, Tensor, differentiable, floating
from hmpx.ops.wrapping.callers import modules, users_frame, users_line
from hmpx.ops.wrapping.observing import Point, Run, Seen
from hmpx.ops.wrapping.overriding import call
from hmpx.ops.wrapping.rules import METHODS

Number = tuple[int, int]  # the batch, and which call of its site it is in there
_STEPS = frozenset("round floor ceil trunc sign heaviside floor_divide bernoulli".split())  # decisions as floats
_equal, _gather = torch.equal, torch.gather


class Taken(NamedTuple):
    """The decisions of one call. dim: the dimension of its input along which they pick its first result, or None."""

    values: list[Tensor]
    dim: int | None


@dataclass
class Call:
    """One call in the pass under the lists.

    given, dtypes: the dtypes of its floating inputs, as they came and as the op saw them. casting: whether a rule
    looked at them. follows: whether no list names the op, so that its inputs decide its precision. drawn: the state of
    the random generators before the call, if it drew numbers. results: its floating results. order: its number among
    all calls. decisions: those of its results that are decisions.
    """

    given: tuple[torch.dtype, ...]
    dtypes: tuple[torch.dtype, ...]
    casting: bool
    follows: bool
    drawn: Tensor | None
    results: list[Tensor]
    order: int
    decisions: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        low = any(result.dtype in LOW for result in self.results)
        # An op that torch promotes, or a cast by hand to FP32, gets inputs in low precision and computes in FP32.
        self.is_low = low or (not self.follows and any(dtype in LOW for dtype in self.dtypes))


@dataclass(eq=False)
class CallSite:
    """One call site: an op, a line, a module.

    calls: the calls under the lists. deltas: the errors of the op alone in the current batch. alone, accumulated: sums
    of the errors of the op alone, and of its results under the lists. loss_change, shifted: by batch, the first-order
    change of the loss by the errors of the op alone, at the weights and at shifted weights. differentiable: whether
    autograd sees its results. first_wrong: batch and order of the first call whose result is finite in FP32 only.
    largest: the largest magnitude that FP32 has there. decisions: those of FP32 in the current batch. decided,
    otherwise: how many decisions there were, and how many the lists changed. changed_at: batch and order of the calls
    with changed decisions. raised: the error that the op raises under the lists, in a line; it runs in FP32 then.
    """

    op: str
    where: str
    module: str
    rule: str = ""
    reason: str = ""
    dtypes: str = ""
    calls: dict[Number, Call] = field(default_factory=dict)
    deltas: dict[Number, list[Tensor | None]] = field(default_factory=dict)
    alone: Distance = field(default_factory=Distance)
    accumulated: Distance = field(default_factory=Distance)
    loss_change: list[float] = field(default_factory=list)
    shifted: list[float] = field(default_factory=list)
    differentiable: bool = True
    not_compared: str = ""
    first_wrong: tuple[int, int] | None = None
    largest: float = 0.0
    decisions: dict[Number, Taken] = field(default_factory=dict)
    decided: int = 0
    otherwise: int = 0
    changed_at: list[tuple[int, int]] = field(default_factory=list)
    raised: str = ""

    def begin_batch(self, batches: int) -> None:
        """Extend the scores to this number of batches; a batch that does not call the site has 0."""
        for scores in (self.loss_change, self.shifted):
            scores.extend([0.0] * (batches - len(scores)))


class Asked(NamedTuple):
    """One call that a pass is asked for."""

    site: CallSite
    point: Point
    run: Run
    args: tuple
    kwargs: dict

    def plainly(self) -> Seen:
        """Run the call as the lists say."""
        return self.run(*self.args, **self.kwargs)

    def answer(self, result: Any) -> Seen:
        """Answer the call with another result."""
        return Seen(self.args, self.kwargs, result, False, 0.0, 0.0)

    def with_arguments(self, args: tuple, kwargs: dict) -> Asked:
        return self._replace(args=args, kwargs=kwargs)


class Pass(Protocol):
    """A run of the model, which decides how each call is computed."""

    def around(self, asked: Asked) -> Seen: ...


class Sites:
    """The observer of a comparison: it finds the site of each call, and lets the current pass compute the call.

    now: the current pass. batch: the number of the current batch.
    """

    everything = True

    def __init__(self) -> None:
        self._found: dict[tuple, CallSite] = {}
        self._names = ModuleNames()
        self.now: Pass | None = None
        self.batch = 0

    def leaves(self, caller: types.CodeType) -> bool:
        return False

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        if self.now is None:
            return run(*args, **kwargs)
        user, module = users_frame(frame), next(modules(frame), None)
        line = (id(user.f_code), user.f_lineno) if user is not None else (0, 0)
        key = (*line, point.op, point.label, id(module))
        site = self._found.get(key)
        if site is None:
            site = self._found[key] = CallSite(point.op, users_line(frame), self._names.of_module(module, frame))
            site.begin_batch(self.batch + 1)
        return self.now.around(Asked(site, point, run, args, kwargs))

    def begin_batch(self, number: int) -> None:
        self.batch = number
        for site in self._found.values():
            site.begin_batch(number + 1)

    def forget_results(self) -> None:
        """Free the results under the lists."""
        for site in self._found.values():
            for kept in site.calls.values():
                kept.results, kept.decisions = [], []

    def end_batch(self) -> None:
        self.forget_results()
        for site in self._found.values():
            site.deltas.clear()
            site.decisions.clear()

    def compared(self) -> list[CallSite]:
        """Return the sites that ran under the lists, in the order in which they were met."""
        return [site for site in self._found.values() if site.calls]


def is_recomputing() -> bool:
    """Whether a backward pass is running: a checkpoint then repeats calls of the forward pass."""
    return torch._C._current_graph_task_id() != -1


def in_fp32(asked: Asked) -> Any:
    """Compute a call in FP32: widen its inputs, except one that it writes to. A cast by hand to less is left out."""
    point = asked.point
    if point.in_place:
        return call(point.original, (*asked.args[:1], *widened(asked.args[1:])), widened(asked.kwargs))
    args, kwargs = widened(asked.args), widened(asked.kwargs)
    result = call(point.original, args, kwargs)
    if point.op == "to" and isinstance(result, Tensor) and result.dtype in LOW:
        return args[0].to(result.device)
    return result


def as_listed(asked: Asked, kept: Call) -> Any:
    """Compute a call on inputs of the dtypes that it had under the lists; None if it has other inputs, or raises."""
    if len(floating((asked.args, asked.kwargs))) != len(kept.dtypes):
        asked.site.not_compared = "another number of inputs in FP32"
        return None
    args, kwargs = _in_dtypes(asked, kept.dtypes)
    if asked.point.in_place:
        args = (args[0].clone(), *args[1:])
    try:
        with region_state.region(True) if kept.casting else contextlib.nullcontext():
            return asked.run(*args, **kwargs).result
    except Exception as error:  # of a constant that FP32 holds and the low dtype does not, say
        asked.site.not_compared = f"from what FP32 hands it, it raises {in_a_line(error)}"
        return None


def of_rounded_inputs(asked: Asked, kept: Call) -> Any:
    """Compute a call in FP32 on inputs that are rounded as they came under the lists."""
    args, kwargs = _in_dtypes(asked, kept.given)
    if asked.point.in_place:
        args = (widened(args[0]).clone(), *args[1:])
    return in_fp32(asked.with_arguments(args, kwargs))


def widened(value: Any) -> Any:
    """Return `value` with its tensors of low precision in FP32."""
    return _mapped(value, lambda tensor: METHODS[torch.float32](tensor) if tensor.dtype in LOW else tensor)


def _in_dtypes(asked: Asked, dtypes: tuple[torch.dtype, ...]) -> tuple[tuple, dict]:
    """Return the arguments with their floating tensors in these dtypes, one after another."""
    rest = iter(dtypes)

    def cast(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        dtype = next(rest, tensor.dtype)
        return tensor if dtype is tensor.dtype else METHODS[dtype](tensor) if dtype in METHODS else tensor.to(dtype)

    return _mapped(asked.args, cast), _mapped(asked.kwargs, cast)


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with each tensor in it changed, in lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _mapped(item, change) for key, item in value.items()}
    return value


def decisions_in(op: str, args: tuple, kwargs: dict, result: Any) -> list[Tensor]:
    """Return copies of the decisions among the results of a call; none if no floating tensor came in."""
    if "out" in kwargs or not floating((args, kwargs)):
        return []
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf.detach().clone() for leaf in found if op in _STEPS or not differentiable(leaf.dtype)]


def taken(asked: Asked, result: Any) -> Taken | None:
    """Return the decisions of one call, so that `taken_again` can repeat them; None if it makes none."""
    args, values = asked.args, decisions_in(asked.point.op, asked.args, asked.kwargs, result)
    if not values:
        return None
    dim = None
    if isinstance(result, tuple) and len(result) == 2 and args and isinstance(args[0], Tensor):
        dims = reversed(range(args[0].dim()))
        dim = next((d for d in dims if _is_equal(_picked(args[0], values[-1], d), result[0])), None)
    return Taken(values, dim)


def taken_again(args: tuple, result: Any, before: Taken | None) -> Any:
    """Return a result with earlier decisions in place of its own, where they fit."""
    if before is None:
        return result
    if isinstance(result, Tensor):
        return before.values[0]
    if before.dim is None:
        return result
    picked = _picked(args[0], before.values[-1], before.dim)
    return result if picked is None else type(result)((picked, before.values[-1]))


def differing(before: list[Tensor], after: list[Tensor]) -> int:
    """Count the decisions that differ; all of them count if their number differs."""
    pairs = zip(before, after, strict=False)
    return sum(int((a != b).sum()) if a.shape == b.shape else max(a.numel(), b.numel()) for a, b in pairs)


def _picked(values: Tensor, indices: Tensor, dim: int) -> Tensor | None:
    """Gather values by indices along a dimension, which the indices may lack; None where they do not fit."""
    reduced = indices.dim() == values.dim() - 1
    whole = indices.unsqueeze(dim) if reduced else indices
    if whole.dtype is not torch.int64 or whole.dim() != values.dim():
        return None
    if any(whole.shape[i] != values.shape[i] for i in range(values.dim()) if i != dim):
        return None
    picked = _gather(values, dim, whole)
    return picked.squeeze(dim) if reduced else picked


def _is_equal(picked: Tensor | None, values: Any) -> bool:
    return picked is not None and isinstance(values, Tensor) and _equal(picked.detach(), values.detach())
