"""Counts the FLOPs that each op of a model could have in low precision, and finds the ops that cannot run in it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from hmpx.base import run_in_region
from hmpx.base.torch_private import tree_map
from hmpx.insight import run_state
from hmpx.insight.finding import in_a_line
from hmpx.insight.recording.recorded import Fp8Casts, watched
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.insight.trials.calls import Asked, CallSite, Compute, compute_in_fp32, in_fp32, is_recomputing, is_transformed
from hmpx.insight.trials.search import SLACK
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.fp8_format import FORMATS
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.observing import Seen, unobserved

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
        self.batch_of: dict[CallSite, int] = {}  # the batch in which a site is counted: the first that met it

    def weighing(self, batch: int) -> Compute:
        """Return what computes the calls of a batch in FP32, and counts what each is worth."""

        def compute(asked: Asked) -> Seen:
            if asked.point.op in self.names and not asked.point.in_place and not is_recomputing():
                with unobserved():
                    self._count(asked, batch)
            return compute_in_fp32(asked)

        return compute

    def _count(self, asked: Asked, batch: int) -> None:
        """Count a call, unless another batch has counted its site, or a list casts nothing there."""
        if self.batch_of.get(asked.site, batch) == batch and (one := self._worth(asked)) is not None:
            self.batch_of[asked.site] = batch
            self.of_place.setdefault(self.place_of(asked.site), Worth()).add(one, asked.site.where)

    def _worth(self, asked: Asked) -> Worth | None:
        """Return the worth of one call. Random numbers that this draws are drawn again afterwards."""
        before, casts = run_state.get_state(), Fp8Casts()
        try:
            with watched(casts):
                one = worth_of(asked)
        except Exception as error:
            return Worth(pinned=f"it does not run in {self.words}: {in_a_line(error)}")
        finally:
            run_state.set_state(before)
        if one is not None and casts.in_low:
            one.pinned = f"it stays in BF16: {next(iter(casts.in_low))}"
        return one

    def place_of(self, site: CallSite) -> NameInModule:
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
        return self.gain(chosen) / (self.gain(self.of_place) or 1.0)

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
    if name == "scaled_dot_product_attention":
        q, k, v = tensors[:3]
        return 2.0 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
    if name.startswith(("lstm", "gru", "rnn_")):
        steps = tensors[0].shape[:-1].numel()
        return 2.0 * steps * sum(t.numel() for t in tensors[1:] if t.dim() == 2)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        in_fp32(asked)
    return float(counter.get_total_flops())
