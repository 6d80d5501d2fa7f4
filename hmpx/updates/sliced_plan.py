"""A step in slices, remembered from one step to the next.

The FP32 shadows of every batch are made once, as views of one room, whose memory is there for the length of a step
alone. One call of the C kernels fills those of a batch, another one writes back what the optimizer leaves in them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import optim

from hmpx.updates.interrupts import mark_incomplete
from hmpx.updates.plan import Plan
from hmpx.updates.planned_batch import PlannedBatch, Shown, can_be_planned, room_for
from hmpx.updates.segment import Segment
from hmpx.updates.slice_buffers import SliceBuffers
from hmpx.updates.sliced_state import SlicedState
from hmpx.updates.sliced_step import OnlyParameters
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.weights import StepStore
from hmpx.updates.write_counts import raises_versions

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class SlicedPlan(Plan):
    """The step of an optimizer that has been taken in these batches.

    Args:
        others: parameters that are stepped as they are, in the first batch.
        store: of the weights.
    """

    def __init__(
        self, optimizer: optim.Optimizer, batches: list[list[Segment]], others: list[Parameter], store: StepStore
    ) -> None:
        super().__init__(optimizer, _parameters(batches) + others, store)
        group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        size = max(room_for(batch, optimizer, store) for batch in batches)
        room = torch.empty(size, dtype=torch.float32, device="cpu")
        self.names = list(dict.fromkeys(segment.name for batch in batches for segment in batch))
        self._room, self._bytes, self._address = room.untyped_storage(), room.nbytes, -1
        self._batches = [PlannedBatch(batch, optimizer, self.params, group, room, store) for batch in batches]
        for p in others:
            self._batches[0].lists[group[p]].append(p)
        counts = [count for batch in self._batches for count in batch.counts]
        self._counts = [count.clone for count in counts], [count.own for count in counts]
        self._last = [count.own for count in counts if count.is_last], [c.clone for c in counts if c.is_last]
        self._late: dict[Parameter, SlicedState] = {}
        self._room.resize_(0)

    @staticmethod
    def can_be(
        optimizer: optim.Optimizer, batches: list[list[Segment]], others: list[Parameter], store: StepStore
    ) -> bool:
        """Whether a step in these batches can be remembered."""
        return (
            bool(batches)
            and Plan.can_be_seen(optimizer, _parameters(batches) + others)
            and all(can_be_planned(each, optimizer.state.get(each.param), store) for batch in batches for each in batch)
        )

    def fits(self, optimizer: optim.Optimizer) -> bool:
        """Whether the next step is that of the plan, and no other parameter takes part in it."""
        return super().fits(optimizer) and not self.others(optimizer)

    def prepare(self, call: StepCall, write_back: WriteBack) -> Callable[[], None]:
        return partial(self.run, call, write_back)

    def run(self, call: StepCall, write_back: WriteBack) -> None:
        """Take the step; an optimizer of which something is written when it raises is marked incomplete."""
        written: list[str] = []
        write_back = write_back.deferred()
        self._room.resize_(self._bytes)
        try:
            if self._room.data_ptr() != self._address:
                self._address = self._room.data_ptr()
                for batch in self._batches:
                    batch.moved(self._address)
            if self._counts[0]:
                torch._foreach_copy_(*self._counts)
            for batch in self._batches:
                self._step(batch, call, write_back, written)
            if self._last[0]:
                torch._foreach_copy_(*self._last)
        except BaseException as error:
            if written:
                mark_incomplete(call.optimizer, write_back.rounding_key.step, written, error)
            raise  # with its memory, which whoever shows a traceback's tensors reads; the plan is not taken again
        finally:
            self._late.clear()
        self._room.resize_(0)

    def _step(self, batch: PlannedBatch, call: StepCall, write_back: WriteBack, written: list[str]) -> None:
        optimizer, states, shown = call.optimizer, call.optimizer.state, batch.shown
        grads = batch.read(self._gradients)
        versions = [tensor._version for tensor, _ in batch.watched]
        seen = [grad._version for grad in grads]
        states.update(batch.states)
        try:
            with OnlyParameters(optimizer.param_groups, batch.lists):
                call.run()
        except BaseException:
            pairs, is_blind = zip(batch.watched, versions, strict=True), not raises_versions(optimizer)
            written += [name for (tensor, name), version in pairs if is_blind or tensor._version != version]
            for each in shown:
                _undo(each, states)
            raise
        written += batch.names
        batch.write(write_back.rounding_key.of_step)
        _hand_back(batch, grads, seen, write_back.store)
        for each, left in zip(shown, batch.states_left(states), strict=True):
            if each.own is not None:
                if left is not each.own:
                    states[each.segment.param] = left
            elif each.segment.param in self._late or not _is_same(left, each.state):
                batch.show_again(each)
                self._take(each, left, states, write_back)
        write_back.rounding_key.flush()

    def _take(self, each: Shown, left: dict | None, states: dict, write_back: WriteBack) -> None:
        """Take state that is not what the optimizer was shown: other tensors, or more of them."""
        segment, shadow = each.segment, each.shadow
        if segment.param not in self._late:
            self._late[segment.param] = SlicedState(states, segment, write_back)
        if left is not None:
            states[shadow] = left
        self._late[segment.param].take_back(segment, shadow)
        if segment.is_last:
            self._late.pop(segment.param).finish()


def _hand_back(batch: PlannedBatch, grads: list[Any], versions: list[int], store: StepStore) -> None:
    """Do to the parameters' gradients what the step did to those that it was shown."""
    left: list[Any] = [each.shadow.grad for each in batch.shown]
    if not all(map(is_, left, grads)) or [grad._version for grad in grads] != versions:
        for each, now, grad, version in zip(batch.shown, left, grads, versions, strict=True):
            if now is not grad or grad._version != version:
                buffers = SliceBuffers(store, by_memory=True)
                buffers.hold(each.segment)
                buffers.hand_back(each.segment, now)
                each.shadow.grad = each.grad
    batch.forget_gradients()


def _parameters(batches: list[list[Segment]]) -> list[Parameter]:
    return list({segment.param: None for batch in batches for segment in batch})


def _undo(each: Shown, states: dict) -> None:
    """Give a parameter its state again, after a step that raised."""
    states.pop(each.shadow, None)
    if each.own is not None:
        each.own.clear()
        each.own.update(each.content)
    each.shadow.grad = each.grad


def _is_same(left: dict | None, state: dict | None) -> bool:
    """Whether the tensors that the optimizer was shown are those that it left."""
    if left is None or state is None:
        return left is state
    return len(left) == len(state) and all(left.get(key) is value for key, value in state.items())
