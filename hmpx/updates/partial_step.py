"""A step that is taken in parts: by slices, and by fused kernels where they were asked for."""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch

from hmpx.rounding.xla import is_lazy
from hmpx.updates.fused_step import FusedStep, Launch
from hmpx.updates.held_state import held, is_coded
from hmpx.updates.interrupts import mark_incomplete
from hmpx.updates.optimizer_scope import scope_of
from hmpx.updates.plan import Plan
from hmpx.updates.segment import Segment
from hmpx.updates.sliced_plan import SlicedPlan
from hmpx.updates.sliced_step import SlicedStep
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.update_counts import watched_kernel

Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class PartialStep:
    """One step, of which `run` takes a part; under `torch.no_grad()`.

    Args:
        call: without a closure.
        segments: the BF16 parameters of the optimizer, whole.
        fused: whether parameters that a fused kernel can step are stepped by it.
    """

    def __init__(self, call: StepCall, segments: list[Segment], write_back: WriteBack, *, fused: bool) -> None:
        self._call, self._optimizer, self._write_back = call, call.optimizer, write_back
        self._fused = FusedStep(call.optimizer, write_back) if fused else None
        self._segments = {segment.param: segment for segment in segments}
        self._slices = SlicedStep(call, write_back)
        self._by_element = scope_of(self._optimizer) == "element"
        self._group = {p: group for group in self._optimizer.param_groups for p in group["params"]}

    def run(self, params: list[Parameter], plan: Plan | None = None) -> None:
        """Step `params`, which have gradients, and the parameters of `plan`."""
        sliced: list[Segment] = []
        taken: list[tuple[dict, Segment]] = []
        for segment in (self._segments[p] for p in params if p in self._segments):
            group = self._group[segment.param]
            if self._fused is not None and self._fused.takes(group, segment):
                taken.append((group, segment))
            else:
                sliced.append(segment)
        self._others = [p for p in params if p not in self._segments]
        self._has_taken = bool(taken)
        kernels = self._kernels(taken)
        if plan is not None:
            kernels.append((plan.names, plan.prepare(self._call, self._write_back)))
        try:
            self._slices.run(sliced, self._others, self._by_element)
            for names, kernel in kernels:
                self._slices.written += names
                kernel()
        except BaseException as error:
            if self._slices.written:
                step = self._write_back.rounding_key.step
                mark_incomplete(self._optimizer, step, self._slices.written, error)
            raise

    def plan(self, again: bool = False) -> Plan | None:
        """What the next step can do again of the part that `run` has taken last.

        again: whether the step before has stepped the same parameters, and so the next one may.
        """
        if self._write_back.counts is not None:
            return None
        if self._fused is not None and self._has_taken:
            return self._fused.plan()
        batches = self._slices.batches
        if (
            not again
            or not self._by_element
            or not SlicedPlan.can_be(self._optimizer, batches, self._others, self._write_back.store)
        ):
            return None
        self._slices.release()
        return SlicedPlan(self._optimizer, batches, self._others, self._write_back.store)

    def _kernels(self, taken: list[tuple[dict, Segment]]) -> list[tuple[list[str], Launch]]:
        """What steps these parameters with fused kernels, each with the names of those that it steps."""
        fused, counts = self._fused, self._write_back.counts
        if fused is None or not taken:
            return []
        if counts is None:
            return [([segment.name for _, segment in taken], fused.prepare(taken))]
        return [
            (
                [segment.name],
                watched_kernel(
                    counts, segment, fused.prepare([(group, segment)]), functools.partial(fused.exact, group, segment)
                ),
            )
            for group, segment in taken
        ]


def is_uniform(optimizer: Optimizer, segments: list[Segment], planned: Collection[Parameter] = frozenset()) -> bool:
    """Whether all parts of a step will run if the first one does: gradients are dense, and state is of one kind.

    False on XLA, where a step is one graph and the compiler bounds its memory.

    Args:
        planned: parameters with the state that they had when this was asked of all: one of them tells of the others.
    """
    if any(is_lazy(segment.param) for segment in segments):
        return False
    by_element = scope_of(optimizer) == "element"
    for group in optimizer.param_groups:
        kinds: dict[bool, set] = {}
        for p in group["params"]:
            if p in planned and (p.dim() > 1) in kinds:
                continue
            state = optimizer.state.get(p)
            if not isinstance(state, dict) or not state:
                continue
            if is_coded(state):
                state = held(state, p)
            kinds.setdefault(p.dim() > 1, set()).add(frozenset(state))  # Adafactor: another kind for matrices
            if by_element:
                shape = p.shape
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                        return False
        if any(len(kind) > 1 for kind in kinds.values()):
            return False
    grads = (segment.param.grad for segment in segments)
    return all(grad is None or grad.layout is torch.strided for grad in grads)
