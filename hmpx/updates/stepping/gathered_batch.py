"""A batch of one sharded parameter, for an optimizer that reads whole parameters: every rank computes the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import held_part, like, local
from hmpx.updates.stepping.batch import OnlyParameters, hand_back
from hmpx.updates.stepping.optimizer_scope import by_memory
from hmpx.updates.stepping.shown import Around
from hmpx.updates.stepping.step_call import StepCall, WriteBack
from hmpx.updates.stepping.update_counts import before_step
from hmpx.updates.stepping.whole_step_state import GatheredShadowState

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor


class GatheredBatch:
    """It is gathered when it is stepped, and this rank keeps its part of the result; under `torch.no_grad()`."""

    def __init__(self, segment: Segment, around: Around) -> None:
        self._segment, self._place, self._stores = segment, around.places[segment.param], around.stores
        self._lists: list[list[Tensor]] = [[] for _ in around.optimizer.param_groups]
        self._group, self._by_memory = around.group[segment.param], by_memory(around.optimizer)

    def step(self, call: StepCall, write_back: WriteBack, gradients: list[Tensor], written: list[str]) -> None:
        """As `Batch.step`."""
        optimizer, segment, key = call.optimizer, self._segment, write_back.rounding_key
        p, store = cast("DTensor", segment.param), self._stores.of(segment)
        held = torch.empty_like(local(p), dtype=torch.float32, requires_grad=False)
        store.read(segment, held)
        before = None if write_back.counts is None else before_step(segment, held)
        shadow = like(p, held).full_tensor()
        shadow.grad = shown = cast("DTensor", segment.grad).full_tensor().float()
        version = shown._version
        state = GatheredShadowState(optimizer, segment, shadow, write_back, self._by_memory)
        try:
            state.show()
            self._lists[self._group][:] = [shadow]
            with OnlyParameters(optimizer.param_groups, self._lists):
                call.run()
        except BaseException:  # what the step has written to are copies
            state.undo()
            raise
        written.append(segment.name)
        state.finish()
        left = shadow.grad
        if left is not shown or left._version != version:
            strided = left is not None and left.layout is torch.strided
            hand_back(segment, held_part(p, left) if strided else left, gradients, self._place)
        segment.mark_written()
        x = held_part(p, shadow)
        store.write(segment, x, segment.name, key)
        key.flush()
        if before is not None and write_back.counts is not None:
            write_back.counts.compare(before, x)
