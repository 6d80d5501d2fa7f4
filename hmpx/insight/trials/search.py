"""The search of `compare` and `tune`: as much in low precision as holds.

1. Everything that saves something is measured together. If it holds, only step 5 is left.
2. Else each unit (a list name, everywhere) runs alone in low precision in one batch. Its harm is the square of the
   error. Units are ranked by harm over what they save; one that takes a large part of the tolerance is divided by
   module, outer blocks first.
3. The longest beginning of the ranking that holds is found by bisection. The unit behind it is left out, and the search
   goes on behind that.
4. A unit that was left out is tried in the place of units that save less.
5. Units that save next to nothing are added if the error does not grow: this saves casts.

What an op saves are the FLOPs that it could have in low precision (`worth_of`), which also finds ops that cannot run in
it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from hmpx.base import run_in_region
from hmpx.base.torch_private import tree_map, tree_map_only
from hmpx.insight.finding import in_a_line
from hmpx.insight.recording.recorded import Fp8Casts, watched
from hmpx.insight.report import grouped
from hmpx.insight.tensors import LOW, Tensor, floating, random_state, set_random_state
from hmpx.insight.trials.calls import Asked, Compute, RunSite, compute_in_fp32, in_fp32, is_recomputing, is_transformed
from hmpx.insight.trials.runs import Effect
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.fp8_format import FORMATS
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import Seen, unobserved

T = TypeVar("T")
PIECES = 8  # into which something is divided at once
SLACK = 0.02  # of what low precision saves in all: less than that is no reason for an error
_LARGE = 0.25  # of the tolerance, as a square: a unit that takes more is divided by module
_SWAPS = 3  # units that were left out and are tried again
_FAR = 2.0  # times the room that is left, as a square: a unit that takes more is not tried


def largest(
    order: Sequence[T],
    holds: Callable[[list[T]], bool],
    guess: Callable[[list[T], list[T]], int] = lambda kept, rest: len(rest) // 2,
    hopeless: Callable[[T, list[T]], bool] = lambda unit, kept: False,
) -> tuple[list[T], list[T]]:
    """Return what holds together, and what is left out. The first of the order are wanted most.

    Args:
        holds: whether a part holds; it is never asked about nothing.
        guess: called as guess(kept, rest), how many of the first of the rest probably hold beside what is kept.
        hopeless: called as hopeless(unit, kept), whether a unit need not be tried beside what is kept.
    """
    kept: list[T] = []
    left: list[T] = []
    rest = [*order]
    while rest:
        count = longest(len(rest), lambda n: holds(kept + rest[:n]), guess(kept, rest))  # noqa: B023  called here
        kept += rest[:count]
        left += rest[count : count + 1]
        behind = rest[count + 1 :]
        rest = [unit for unit in behind if not hopeless(unit, kept)]
        left += [unit for unit in behind if unit not in rest]
    return kept, left


def longest(many: int, holds: Callable[[int], bool], guess: int) -> int:
    """Return how many of the first hold: all of them, or by bisection in growing steps from a guess."""
    few, step = 0, 1
    if holds(many):
        return many
    while many - few > 1:
        middle = min(max(guess, few + 1), many - 1)
        if holds(middle):
            few, guess = middle, middle + step
        else:
            many, guess = middle, middle - step
        step *= 2
    return few


def pieces_of(unit: Collection[T], module_of: Callable[[T], str]) -> list[frozenset[T]]:
    """Divide by the outermost blocks in which modules differ; many blocks stay together by neighbours.

    What has one module has one part.
    """
    ordered = sorted(unit, key=lambda each: _block_key(module_of(each)))
    blocks: dict[tuple, list[T]] = {}
    for depth in range(1, 2 + max(module_of(each).count(".") for each in ordered)):
        blocks = grouped(ordered, lambda each: tuple(module_of(each).split(".")[:depth]))  # noqa: B023  called here
        if len(blocks) > 1:
            break
    groups = [*blocks.values()]
    size = math.ceil(len(groups) / PIECES)
    return [frozenset(itertools.chain(*groups[i : i + size])) for i in range(0, len(groups), size)]


def _block_key(module: str) -> tuple:
    """Return a key by which block 10 stands behind block 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in module.split("."))


class Search:
    """One search.

    measure: called as measure(choice, batches, enough=math.inf), returns what the choice changes in these batches; it
    may end early where the error exceeds `enough`. batches: their numbers; the one that shows most comes to stand
    first. nothing: what remains with every op in FP32. gain: what places save.

    measured: what choices do to all batches; a choice that does not hold may have been measured in fewer. alone: what
    units do alone in the first batch. order: the units of the choice, the one that does least for what it saves first.
    left: the units that do not fit.
    """

    def __init__(
        self,
        measure: Callable[..., Effect],
        batches: list[int],
        tolerance: float,
        nothing: Effect,
        gain: Callable[[Collection], float] = len,
    ) -> None:
        self._measure, self._batches, self._gain, self._tolerance = measure, batches, gain, tolerance
        self.measured: dict[frozenset, Effect] = {frozenset(): nothing}
        self.alone: dict[frozenset, Effect] = {}
        self.order: list[frozenset] = []
        self.left: list[frozenset] = []

    def run(self, names: Sequence[frozenset], wished: frozenset | None = None) -> frozenset:
        """Return the choice among names. wished: the part of them that is worth an error; None: all of them."""
        chosen = frozenset().union(*names) if wished is None else wished
        self.order = [unit for unit in names if unit <= chosen]
        if chosen:
            by_batch = self.effect(chosen).by_batch
            self._batches.sort(key=lambda number: -by_batch.get(number, 0.0))
            if not self.holds(chosen):
                # Beginnings of the ranking are tried, not one op more or less: some NaN are cured by two ops together.
                chosen = self._swapped(self._filled(self._ranked(self.order)))
        return self._with_harmless(chosen, names)

    def effect(self, chosen: frozenset, enough: float = math.inf) -> Effect:
        if chosen not in self.measured:
            self.measured[chosen] = self._measure(chosen, self._batches, enough)
        return self.measured[chosen]

    def holds(self, chosen: frozenset) -> bool:  # in all batches: by the worst alone, too many units are to blame
        return self.effect(chosen, self._tolerance).size <= self._tolerance

    def dropped(self, chosen: frozenset, size_of: Callable[[frozenset], float]) -> frozenset:
        """Return as much of the choice, in the order of the ranking, as holds on its own and on other batches.

        size_of: what a choice does to the other batches.
        """
        size = size_of(chosen)
        if size <= self._tolerance or not chosen:
            return chosen
        order = self._ranked(self.order)
        room = sum(map(self._harm, order)) * (self._tolerance / size) ** 2 if math.isfinite(size) else 0.0

        def holds(some: list[frozenset]) -> bool:
            part = frozenset().union(*some)
            return size_of(part) <= self._tolerance and self.holds(part)

        count = longest(len(order), lambda n: holds(order[:n]), self._fitting(order, room))
        self.order, self.left = order[:count], self.left + order[count:]
        return frozenset().union(*self.order)

    def _harm(self, unit: frozenset) -> float:
        """Return the square of the error of a unit alone in the first batch.

        That is an error of gradients. How far the unit's own result is off ranks ops badly.
        """
        if unit not in self.alone:
            self.alone[unit] = self._measure(unit, self._batches[:1])
        return self.alone[unit].size ** 2

    def _ranked(self, units: Sequence[frozenset]) -> list[frozenset]:
        """Return the units, harmful ones divided, ranked by harm for what they save; of equal ones the least harm."""
        found, rest = [], [*units]
        while rest:
            unit = rest.pop()
            pieces = pieces_of(unit, lambda place: place.module)
            if len(pieces) == 1 or self._harm(unit) <= _LARGE * self._tolerance**2:
                found.append(unit)
            else:
                rest += pieces
        key = {unit: self._harm(unit) / max(self._gain(unit), 1e-30) for unit in found}
        return sorted(found, key=lambda unit: (key[unit], self._harm(unit), sorted(map(str, unit))))

    def _filled(self, order: list[frozenset]) -> frozenset:
        """Return as much of a ranking as holds. What does not fit is left out, and the search goes on behind it."""

        def union(units: list[frozenset]) -> frozenset:
            return frozenset().union(*units)

        self.order, self.left = largest(
            order,
            lambda units: self.holds(union(units)),
            lambda kept, rest: self._fitting(rest, self._room(union(kept))),
            lambda unit, kept: self._harm(unit) > _FAR * self._room(union(kept)),
        )
        return union(self.order)

    def _fitting(self, order: Sequence[frozenset], room: float) -> int:
        """Return how many of the first have room, if errors are independent."""
        return sum(harm <= room for harm in itertools.accumulate(map(self._harm, order)))

    def _room(self, chosen: frozenset) -> float:
        return self._tolerance**2 - self.effect(chosen).size ** 2

    def _swapped(self, chosen: frozenset) -> frozenset:
        """Return the choice with units that were left out in the place of others that together save less."""
        finite = [unit for unit in self.left if math.isfinite(self._harm(unit))]
        for added in sorted(finite, key=lambda unit: -self._gain(unit))[:_SWAPS]:
            gain, room = self._gain(added), self._room(chosen) - self._harm(added)
            removed: list[frozenset] = []
            for unit in sorted(self.order, key=self._harm, reverse=True):
                if room < 0 and self._gain(unit) < gain:
                    removed.append(unit)
                    gain -= self._gain(unit)
                    room += self._harm(unit)
            other = chosen.difference(*removed) | added
            if removed and room >= 0 and gain > 0 and self.holds(other):
                self.left = [unit for unit in [*self.left, *removed] if unit != added]
                self.order = [unit for unit in self.order if unit not in removed] + [added]
                chosen = other
        return chosen

    def _with_harmless(self, chosen: frozenset, names: Sequence[frozenset]) -> frozenset:
        """Return the choice with what saves next to nothing: all of it, or what does least alone, or none of it."""
        tried = frozenset().union(chosen, *self.left)
        small = [unit for unit in names if not unit & tried]
        if not chosen or not small:
            return chosen
        if not self._is_as_good(chosen.union(*small), chosen):
            small.sort(key=lambda unit: (self._harm(unit), sorted(map(str, unit))))
            room = ((1 + SLACK) ** 2 - 1) * self.effect(chosen).by_batch[self._batches[0]] ** 2
            sums = itertools.accumulate(map(self._harm, small))
            small = small[: sum(harm <= room for harm in sums)]
            if not self._is_as_good(chosen.union(*small), chosen):
                return chosen
        self.order += small
        return chosen.union(*small)

    def _is_as_good(self, larger: frozenset, chosen: frozenset) -> bool:
        """Return whether a choice adds next to no error to another one: in the first batch, then in all."""
        first, before = self._batches[:1], self.effect(chosen)
        if larger not in self.measured and self._measure(larger, first).size > (1 + SLACK) * before.by_batch[first[0]]:
            return False
        return self.effect(larger).size <= min(self._tolerance, (1 + SLACK) * before.size)


Low = Literal["bf16", "fp8"]
WIDE: dict[Low, str] = {"bf16": "fp32", "fp8": "bf16"}  # the list that a name is in otherwise
LOWS = (*WIDE, *FORMATS)  # what `tune` takes: a list, or "fp8" by the name of its format


class NameInModule(NamedTuple):
    """A list name in one module: the least that a rule can decide about.

    module: "" for calls outside of every module that a rule can name.
    """

    name: str
    module: str = ""


Unit = frozenset[NameInModule]  # what is decided about at once: a name everywhere, or in some modules
Chosen = frozenset[NameInModule]  # the places in low precision


@dataclass
class Worth:
    """What the calls of a place do in one batch.

    flops: of the forward pass of matrix products. pinned: why it cannot be in low precision. lines: that call it.
    """

    flops: float = 0.0
    pinned: str = ""
    calls: int = 0
    lines: dict[str, None] = field(default_factory=dict)

    def add(self, one: Worth, where: str) -> None:
        """Add one call at a line."""
        self.flops += one.flops
        self.pinned = self.pinned or one.pinned
        self.calls += 1
        self.lines[where] = None


class Worths:
    """The worth of each place in low precision. of_place: by place, in the order in which they were met."""

    def __init__(self, low: Low = "bf16", modules: Collection[str] = (), words: str = "") -> None:
        self.low, self.wide, self.names = low, WIDE[low], decidable(low)
        self.words = words or low.upper()
        self._modules = frozenset(modules)
        self.of_place: dict[NameInModule, Worth] = {}
        self._beside = 0.0  # FLOPs of products that are not decided about, as of a convolution that cannot be in FP8
        self.batch_of: dict[RunSite, int] = {}  # the batch in which a site is counted: the first that met it

    def weighing(self, batch: int) -> Compute:
        """Return what computes the calls of a batch in FP32, and counts what each is worth."""

        def compute(asked: Asked) -> Seen:
            if not asked.point.in_place and not is_recomputing():
                with unobserved():
                    if asked.point.op in self.names:
                        self._count(asked, batch)
                    elif self.batch_of.setdefault(asked.site, batch) == batch:
                        self._beside += _flops(asked)
            return compute_in_fp32(asked)

        return compute

    def _count(self, asked: Asked, batch: int) -> None:
        """Count a call, unless another batch has counted its site, or a list casts nothing there."""
        if self.batch_of.get(asked.site, batch) == batch and (one := self._worth(asked)) is not None:
            self.batch_of[asked.site] = batch
            self.of_place.setdefault(self.place_of(asked.site), Worth()).add(one, asked.site.where)

    def _worth(self, asked: Asked) -> Worth | None:
        """Return the worth of one call. Random numbers that this draws are drawn again afterwards."""
        before, casts = random_state(), Fp8Casts()
        try:
            with watched(casts):
                one = worth_of(asked)
        except Exception as error:
            return Worth(pinned=f"it does not run in {self.words}: {in_a_line(error)}")
        finally:
            set_random_state(before)
        if one is not None and casts.in_low:
            one.pinned = f"it stays in BF16: {next(iter(casts.in_low))}"
        return one

    def place_of(self, site: RunSite) -> NameInModule:
        return NameInModule(site.op, site.module if site.module in self._modules else "")

    @property
    def free(self) -> Chosen:
        """Return the places that can be in low precision."""
        return frozenset(place for place, worth in self.of_place.items() if not worth.pinned)

    def gain(self, places: Collection[NameInModule]) -> float:
        """Return the FLOPs of these places."""
        return sum(self.of_place[place].flops for place in places)

    def share(self, chosen: Chosen) -> float:
        """Return the share of all FLOPs of matrix products that is in low precision."""
        return self.gain(chosen) / (self.gain(self.of_place) + self._beside or 1.0)

    def wished(self, units: Sequence[Unit]) -> Chosen:
        """Return the places of all units that save something, less those that together save next to nothing."""
        chosen: Chosen = frozenset().union(*(unit for unit in units if self.gain(unit)))
        room = SLACK * self.gain(chosen)
        for gain, places in sorted((self.gain(unit), sorted(unit)) for unit in units if unit <= chosen):
            if gain > room:
                break
            room -= gain
            chosen = chosen.difference(places)
        return chosen


def words_of(low: Low, policy: Policy) -> str:
    """Return what the low precision is called: "BF16", or of the fp8 list "FP8" or "FP4"."""
    return policy.fp8_format.bits if low == "fp8" else low.upper()


@functools.cache
def decidable(low: Low = "bf16") -> frozenset[str]:
    """Return the names that tune puts into a list: ops that make new values, or that have an FP8 product."""
    if low == "fp8":
        return frozenset(op_facts.MATRIX_PRODUCTS)
    return frozenset(name for name, op in catalog().items() if op.computes and not op.view and name[0] != "_")


def worth_of(asked: Asked) -> Worth | None:
    """Count one call; None where the list of low precision casts nothing.

    Raises:
        Exception: whatever the op raises in low precision, in its forward or its backward pass.
    """
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):  # unseen by a checkpoint around the call
        with run_in_region.region(True):
            seen = asked.run(*asked.args, **asked.kwargs)
        if not seen.casting or not any(tensor.dtype in LOW for tensor in floating((seen.args, seen.kwargs))):
            return None
        if not is_transformed():  # torch.func hands out no tensor that has a gradient of its own
            _forward_and_backward(asked, seen)
        return Worth(_flops(asked))


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _forward_and_backward(asked: Asked, seen: Seen) -> None:
    """Run a call on the inputs that its op has seen in low precision, and its backward pass."""

    def leaf(value: object) -> object:
        return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    args, kwargs = tree_map(leaf, (seen.args, seen.kwargs))
    needed = [tensor for tensor in floating((args, kwargs)) if tensor.requires_grad]
    with run_in_region.region(True):
        result = asked.run(*args, **kwargs).result
    results = [each for each in floating((result,)) if each.requires_grad]
    if needed and results:
        torch.autograd.grad(results, needed, [torch.ones_like(each) for each in results], allow_unused=True)


def _flops(asked: Asked) -> float:
    """Return the FLOPs of a matrix product, forward; 0 for every other op."""
    name = asked.point.op
    if name not in op_facts.FP32_KERNELS:
        return 0.0
    tensors = floating((asked.args, asked.kwargs))
    if nested := [each for each in tensors if each.is_nested]:  # torch's counter takes them apart, which they refuse
        return sum(_flops(_of_part(asked, i)) for i in range(nested[0].size(0)))
    if name == "scaled_dot_product_attention":
        q, k, v = tensors[:3]
        return 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if name.startswith(("lstm", "gru", "rnn_")):
        steps = tensors[0].shape[:-1].numel()
        return 2.0 * steps * sum(t.numel() for t in tensors[1:] if t.dim() == 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        in_fp32(asked)
    return float(counter.get_total_flops())


def _of_part(asked: Asked, i: int) -> Asked:
    """Return the same call on one of the tensors in each nested one."""

    def part(tensor: Tensor) -> Tensor:
        return tensor.detach().unbind()[i] if tensor.is_nested else tensor

    return asked._replace(**tree_map_only(Tensor, part, {"args": asked.args, "kwargs": asked.kwargs}))
