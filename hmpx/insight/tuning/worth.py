"""Measures what low precision saves at each call of an op: time, FLOPs, or memory saved for the backward pass."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from hmpx.base import region_state
from hmpx.insight import run_state
from hmpx.insight.comparing.calls import Asked, CallSite, in_fp32, is_recomputing
from hmpx.insight.reasons import in_a_line
from hmpx.insight.recording.device import Fp8Casts, watched
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.insight.tuning.runs import exactly
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.wrapping.observing import Seen, unobserved

Objective = Literal["speed", "coverage", "memory"]
UNITS = {"speed": "s", "coverage": "FLOP", "memory": "B"}
Low = Literal["bf16", "fp8"]
WIDE: dict[Low, str] = {"bf16": "fp32", "fp8": "bf16"}  # the list that a name is in otherwise
SLACK = 0.02  # of what low precision saves in all: less than that is no reason for an error
_ROUNDS = 5  # of a time that is measured
_LEAST = 2e-4  # seconds that a round takes at least
_SIZES = 1 << 12, 1 << 20  # elements of the two casts that are timed


class NameInModule(NamedTuple):
    """A list name in one module: the least that a rule can decide about.

    module: "" for calls outside of every module that a rule can name.
    """

    name: str
    module: str = ""


Unit = frozenset[NameInModule]  # what is decided about at once: a name everywhere, or in some modules
Chosen = frozenset[NameInModule]  # the places in low precision


@dataclass
class Cost:
    """What the calls of a place take in one batch, in the unit of the objective.

    low, wide: in low precision, and otherwise. flops: of the forward pass of matrix products. pinned: why it cannot be
    in low precision. lines: that call it.
    """

    low: float = 0.0
    wide: float = 0.0
    flops: float = 0.0
    pinned: str = ""
    calls: int = 0
    lines: dict[str, None] = field(default_factory=dict)

    def add(self, one: Cost, where: str) -> None:
        """Add one call at a line."""
        self.low, self.wide, self.flops = self.low + one.low, self.wide + one.wide, self.flops + one.flops
        self.pinned = self.pinned or one.pinned
        self.calls += 1
        self.lines[where] = None


class Costs:
    """The cost of each choice. `Look` measures it.

    of_place: the cost of each place. casts: how many tensors, and how many elements, go from the place that made them
    (None: no list decides about it) to the place that takes them.
    """

    def __init__(
        self, objective: Objective, low: Low = "bf16", modules: Collection[str] = (), device: Any = "cpu"
    ) -> None:
        self.objective, self.low, self.wide, self.names = objective, low, WIDE[low], decidable(low)
        self._modules = frozenset(modules)
        self.of_place: dict[NameInModule, Cost] = {}
        self.casts: dict[tuple[NameInModule | None, NameInModule], Counter[str]] = {}
        self.known: dict[tuple, Cost | None] = {}  # by what calls have in common
        self.batch_of: dict[CallSite, int] = {}  # the batch in which a site is counted: the first that met it
        self._cast, self._element = cast_seconds(device) if objective == "speed" else (0.0, 0.0)

    def place_of(self, site: CallSite) -> NameInModule:
        return NameInModule(site.op, site.module if site.module in self._modules else "")

    @property
    def free(self) -> Chosen:
        """Return the places that can be in low precision."""
        return frozenset(place for place, cost in self.of_place.items() if not cost.pinned)

    def of(self, chosen: Chosen) -> float:
        """Return what everything costs with these places in low precision."""
        total = sum(cost.low if place in chosen else cost.wide for place, cost in self.of_place.items())
        for (source, place), casts in self.casts.items():
            if (source in chosen) is not (place in chosen):
                total += self._cast * casts["tensors"] + self._element * casts["elements"]
        return total

    def gain(self, unit: Unit, beside: Chosen) -> float:
        """Return what a unit saves in low precision, while the other places are as chosen."""
        return self.of(beside - unit) - self.of(beside | unit)

    def share(self, chosen: Chosen) -> float:
        """Return the share of the FLOPs of matrix products that is in low precision."""
        whole = sum(cost.flops for cost in self.of_place.values())
        return sum(cost.flops for place, cost in self.of_place.items() if place in chosen) / (whole or 1.0)

    def wished(self, units: Sequence[Unit]) -> Chosen:
        """Return the cheapest choice, less the units that together save next to nothing.

        It is found by changes of single units, from all in low precision on.
        """
        chosen: Chosen = frozenset().union(*units)
        for _ in units:
            before = chosen
            for unit in units:
                chosen = chosen | unit if self.gain(unit, chosen) > 0 else chosen - unit
            if chosen == before:
                break
        room = SLACK * (self.of(Chosen()) - self.of(chosen))
        gains = [(self.gain(unit, chosen), sorted(unit)) for unit in units if unit <= chosen]
        for gain, places in sorted(gains):
            if gain > room:
                break
            room -= gain
            chosen = chosen.difference(places)
        return chosen


@functools.cache
def decidable(low: Low = "bf16") -> frozenset[str]:
    """Return the names that tune puts into a list: ops that make new values, or that have an FP8 product."""
    if low == "fp8":
        return frozenset(op_facts.MATRIX_PRODUCTS)
    return frozenset(name for name, op in catalog().items() if op.computes and not op.view and name[0] != "_")


class Look:
    """Computes the calls of a batch in FP32. It measures what each costs, and notes where its inputs come from."""

    def __init__(self, costs: Costs, batch: int) -> None:
        self._costs, self._batch = costs, batch
        self._made: dict[int, NameInModule | None] = {}  # by memory, the place that made what is in it
        self._alive: list[Tensor] = []  # so that no memory becomes another tensor's

    def __call__(self, asked: Asked) -> Seen:
        if is_recomputing():
            return exactly(asked)
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        decided = asked.point.op in self._costs.names and not asked.point.in_place and not transformed
        place = None
        if decided:
            with unobserved():
                place = self._look(asked)
        seen = exactly(asked)
        for tensor in () if transformed else floating((seen.result,)):  # there it stands for several, and has no memory
            memory = tensor.untyped_storage().data_ptr()
            if decided or memory not in self._made:  # a view has the memory of what it looks at
                self._made[memory] = place
                self._alive.append(tensor.detach())
        return seen

    def _look(self, asked: Asked) -> NameInModule | None:
        """Count a call, and return its place; None where a list casts nothing."""
        costs, place = self._costs, self._costs.place_of(asked.site)
        if costs.batch_of.get(asked.site, self._batch) != self._batch:
            return place
        one = self._cost(asked)
        if one is None:
            return None
        costs.batch_of[asked.site] = self._batch
        costs.of_place.setdefault(place, Cost()).add(one, asked.site.where)
        for tensor in floating((asked.args, asked.kwargs)):
            source = self._made.get(tensor.untyped_storage().data_ptr())
            casts = costs.casts.setdefault((source, place), Counter())
            casts.update(tensors=1, elements=tensor.numel())
        return place

    def _cost(self, asked: Asked) -> Cost | None:
        """Return the cost of one call. Random numbers that this draws are drawn again afterwards."""
        tensors = floating((asked.args, asked.kwargs))
        rest = [each for each in (*asked.args, *asked.kwargs.values()) if not isinstance(each, Tensor)]
        shapes = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        alike = repr(rest) if not any(isinstance(each, list) for each in rest) else ""
        key = asked.point.label, shapes, alike, torch.is_grad_enabled()
        known = self._costs.known
        if key not in known:
            before, casts = run_state.get_state(), Fp8Casts()
            try:
                with watched(casts):
                    known[key] = one = cost_of(asked, self._costs.objective)
                if one is not None and casts.in_low:
                    one.low, one.pinned = one.wide, f"it stays in BF16: {next(iter(casts.in_low))}"
            except Exception as error:
                known[key] = Cost(pinned=f"it does not run in {self._costs.low.upper()}: {in_a_line(error)}")
            finally:
                run_state.set_state(before)
        return known[key]


def cost_of(asked: Asked, objective: Objective) -> Cost | None:
    """Measure one call either way; None where the list of low precision casts nothing.

    Raises:
        Exception: whatever the op raises in low precision, in its forward or its backward pass.
    """
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):  # unseen by a checkpoint around the call
        with region_state.region(True):
            seen = asked.run(*asked.args, **asked.kwargs)
        if not seen.casting or not any(tensor.dtype in LOW for tensor in floating((seen.args, seen.kwargs))):
            return None
        low = _work(asked.with_arguments(seen.args, seen.kwargs), True)
        low()
        flops = _flops(asked)
        if objective == "speed":
            return Cost(seconds(low), seconds(_work(asked, False)), flops)
        if objective == "memory":
            return Cost(_saved(asked, True), _saved(asked, False), flops)
        return Cost(0.0, flops, flops)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _work(asked: Asked, low: bool) -> Callable[[], object]:
    """Return the op, forward and backward, on inputs that have their dtypes already."""

    def leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    call = asked.with_arguments(*tree_map(leaf, (asked.args, asked.kwargs)))
    needed = [tensor for tensor in floating((call.args, call.kwargs)) if tensor.requires_grad]

    def work() -> None:
        with region_state.region(low):
            result = asked.run(*call.args, **call.kwargs).result if low else in_fp32(call)
        results = [each for each in floating((result,)) if each.requires_grad]
        if needed and results:
            torch.autograd.grad(results, needed, [torch.ones_like(each) for each in results], allow_unused=True)

    return work


def seconds(work: Callable[[], object]) -> float:
    """Return the time of `work`, the median of a few rounds."""

    def timed(calls: int) -> float:
        _wait()
        began = perf_counter()
        for _ in range(calls):
            work()
        _wait()
        return (perf_counter() - began) / calls

    work()
    calls = max(1, min(20, math.ceil(_LEAST / max(timed(1), 1e-9))))
    return statistics.median(timed(calls) for _ in range(_ROUNDS))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cast_seconds(device: torch.device) -> tuple[float, float]:
    """Return what a cast to BF16 and the cast of its gradient take: each, and for each element."""

    def both(elements: int) -> float:
        x = torch.zeros(elements, device=device)
        low = x.bfloat16()
        return seconds(lambda: (x.bfloat16(), low.float()))

    small, large = map(both, _SIZES)
    return small, max(large - small, 0.0) / (_SIZES[1] - _SIZES[0])


def _flops(asked: Asked) -> float:
    """Return the FLOPs of a matrix product, forward; 0 for every other op."""
    name = asked.point.op
    if name not in op_facts.FP32_KERNELS:
        return 0.0
    tensors = floating((asked.args, asked.kwargs))
    if name == "scaled_dot_product_attention":
        q, k, v = tensors[:3]
        return 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if name.startswith(("lstm", "gru", "rnn_")):
        steps = tensors[0].shape[:-1].numel()
        return 2.0 * steps * sum(t.numel() for t in tensors[1:] if t.dim() == 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        in_fp32(asked)
    return float(counter.get_total_flops())


def _saved(asked: Asked, low: bool) -> float:
    """Return the bytes that the op saves for its backward pass, with casts; FP32 parameters are there anyway."""
    held: dict[int, int] = {}
    parameters = {t.untyped_storage().data_ptr() for t in floating((asked.args, asked.kwargs)) if t.is_leaf}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters:
            held[memory.data_ptr()] = memory.nbytes()
        return tensor

    alive: Any
    with torch.autograd.graph.saved_tensors_hooks(pack, _itself), region_state.region(low):
        alive = asked.run(*asked.args, **asked.kwargs).result if low else in_fp32(asked)
    del alive
    return float(sum(held.values()))
