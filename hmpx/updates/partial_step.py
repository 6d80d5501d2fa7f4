"""A step that is taken in parts: by slices, and by fused kernels where they were asked for."""

from __future__ import annotations

import torch

from hmpx.updates import fused_step
from hmpx.updates.interrupts import mark_incomplete
from hmpx.updates.optimizer_scope import scope_of
from hmpx.updates.segment import Segment
from hmpx.updates.sliced_step import SlicedStep
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.update_counts import watched_kernel

Parameter = torch.nn.Parameter


class PartialStep:
    """One step, of which `run` takes a part; under `torch.no_grad()`.

    Args:
        call: without a closure.
        segments: the BF16 parameters of the optimizer, whole.
        fused: whether parameters that a fused kernel can step are stepped by it.
    """

    def __init__(self, call: StepCall, segments: list[Segment], write_back: WriteBack, *, fused: bool) -> None:
        self._optimizer, self._write_back = call.optimizer, write_back
        self._fused = fused and write_back.form.in_kernels is not None
        self._segments = {segment.param: segment for segment in segments}
        self._slices = SlicedStep(call, write_back)
        self._by_element = scope_of(self._optimizer) == "element"
        self._group = {p: group for group in self._optimizer.param_groups for p in group["params"]}

    def run(self, params: list[Parameter]) -> None:
        """Step `params`, which have gradients."""
        sliced, kernels = [], []
        for segment in (self._segments[p] for p in params if p in self._segments):
            group = self._group[segment.param]
            if self._fused and fused_step.takes(self._optimizer, group, segment):
                kernel = fused_step.prepare(self._optimizer, group, segment, self._write_back)
                if self._write_back.counts is not None:
                    exact = fused_step.exact(self._optimizer, group, segment, self._write_back)
                    kernel = watched_kernel(self._write_back.counts, segment, kernel, exact)
                kernels.append((segment.name, kernel))
            else:
                sliced.append(segment)
        try:
            self._slices.run(sliced, [p for p in params if p not in self._segments], self._by_element)
            for name, kernel in kernels:
                self._slices.written.append(name)
                kernel()
        except BaseException as error:
            if self._slices.written:
                step = self._write_back.rounding_key.step
                mark_incomplete(self._optimizer, step, self._slices.written, error)
            raise
