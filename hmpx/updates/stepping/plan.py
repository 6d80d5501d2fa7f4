"""The plan of a step: all batches of an optimizer's parameters, kept while a `Fingerprint` finds them as they were."""

from __future__ import annotations

import functools
from operator import or_

import torch

from hmpx.base.torch_private import copy_all
from hmpx.rounding import triton
from hmpx.rounding.table import Table
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import held_part, local
from hmpx.updates.stepping.batch import Batch
from hmpx.updates.stepping.batching import batches_of
from hmpx.updates.stepping.fingerprint import Fingerprint, Gradients
from hmpx.updates.stepping.formula_step import by_formula
from hmpx.updates.stepping.fused_batch import fused_batches
from hmpx.updates.stepping.fused_formulas import Formula
from hmpx.updates.stepping.names import Members
from hmpx.updates.stepping.shown import StepContext
from hmpx.updates.stepping.step_call import StepCall, WriteBack
from hmpx.updates.stepping.whole_batch import WholeBatch

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

_ALIGNED = 16  # bytes: where all gradients begin at a multiple of it, kernels need not be asked whether they take them


class Plan:
    """The batches of parameters that have gradients; under `torch.no_grad()`. It does not hold the optimizer.

    A plan is made once and run in many steps.

    Args:
        params: those that are to be stepped.
        formula: the arithmetic of the step. None: the optimizer's own step is called.
        is_part: others are stepped, too, apart from these.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        members: Members,
        params: list[Parameter],
        write_back: WriteBack,
        formula: Formula | None = None,
        *,
        is_part: bool = False,
    ) -> None:
        self._is_part = is_part
        self._params, self._stores, self._members, self._formula = params, write_back.stores, members, formula
        self._fingerprint: Fingerprint | None = None
        segments = [members.whole[p] for p in params if p in members.whole]
        for segment in segments:
            self._stores.of(segment).begin()
        indices = {p: i for i, p in enumerate(params)}
        context = StepContext(optimizer, self._stores, indices, self._gradients(), members.group, {})
        self._late = context.late
        self._fused = [] if formula is None else fused_batches(segments, formula, context, write_back)
        of_kernels = {segment.param for batch in self._fused for segment in batch.segments}
        segments = [segment for segment in segments if segment.param not in of_kernels]
        others = [(members.group[p], p) for p in params if p not in members.whole]
        self._batches: list[Batch | WholeBatch] = []
        self._rooms: list[tuple[Tensor, int]] = []
        self._tables: list[Table] = []  # of the launches of each room's batches
        devices = list(dict.fromkeys(segment.param.device for segment in segments))
        for device in devices or ([torch.device("cpu")] if others else []):
            self._add([segment for segment in segments if segment.param.device == device], device, context, others)
            others = []
        counts = [count for batch in self._plain for count in batch.counts]
        self._counts = [count.clone for count in counts], [count.own for count in counts]
        last = [count for count in counts if count.is_last]
        self._last = [count.own for count in last], [count.clone for count in last]

    @property
    def _plain(self) -> list[Batch]:
        return [batch for batch in self._batches if isinstance(batch, Batch)]

    def _add(
        self, segments: list[Segment], device: torch.device, context: StepContext, others: list[tuple[int, Parameter]]
    ) -> None:
        """Make the batches of one device, with a room that serves all of them, and `others` in the first."""

        def beside(segment: Segment) -> list[Tensor]:
            p, state = segment.param, context.optimizer.state.get(segment.param)
            own = [v for v in state.values() if isinstance(v, Tensor)] if isinstance(state, dict) else []
            kept = [v for v in context.stores.of(segment).beside if v.shape == local(p).shape]
            return [context.gradients[context.indices[p]], *(local(v) for v in own if v.shape == p.shape), *kept]

        batches: list[Batch] = []
        elements = self._members.elements
        for cut in batches_of(segments, context.optimizer, elements, beside, is_part=self._is_part):
            if cut[0].is_gathered:
                self._batches.append(WholeBatch(cut, gathers=True))
            else:
                batches.append(Batch(cut, context))
                self._batches.append(batches[-1])
        if others and not batches:
            batches.append(Batch([], context))
            self._batches.append(batches[0])
        if others:
            batches[0].others = others
        # Each parameter has one transfer: the parts that it is cut into share a block of codes.
        kernels = [batch.kernels() for batch in batches]
        copied = {s.param for batch, own in zip(batches, kernels, strict=True) if own is None for s in batch.segments}
        room = torch.empty(max([batch.size for batch in batches], default=0), dtype=torch.float32, device=device)
        table = Table(device)
        for batch, own in zip(batches, kernels, strict=True):
            own = own if copied.isdisjoint([segment.param for segment in batch.segments]) else None
            batch.place_in(room, own, table if own is triton else None, context.gradients)
        self._rooms.append((room, room.nbytes))
        self._tables.append(table)

    def _gradients(self) -> list[Tensor]:
        """Return this rank's part of each gradient. One that is cut otherwise than the parameter is redistributed."""
        found = []
        for p in self._params:
            assert p.grad is not None, "only parameters with gradients are stepped"
            found.append(p.grad if type(p.grad) is Tensor else held_part(p, p.grad))
        return found

    def run(self, call: StepCall, write_back: WriteBack, found: Gradients | None = None) -> None:
        """Take the step. found: the gradients, by `fits`."""
        write_back = write_back.deferred()
        if self._batches:
            call = by_formula(call, self._formula, self._members.group)
        if self._fingerprint is not None:
            for room, size in self._rooms:
                room.untyped_storage().resize_(size)
        gradients, addresses = found or (self._gradients(), None)
        self._late.clear()
        for batch in self._fused:
            batch.begin(call)
        for (room, _), table in zip(self._rooms, self._tables, strict=True):
            if table.has_launches:
                addresses = addresses or [grad.data_ptr() for grad in gradients]
                table.send(write_back.rounding_key.of_step, addresses, room.data_ptr())
        if self._counts[0]:
            copy_all(*self._counts)
        for each in self._batches:
            each.step(call, write_back, gradients)
        for batch in self._fused:
            batch.step(call, write_back, gradients, addresses)
        if self._last[0]:
            copy_all(*self._last)

    def keep(self, optimizer: Optimizer) -> bool:
        """After the first step, take the fingerprint; return whether the batches can be stepped again."""
        if len(self._plain) < len(self._batches) or not Fingerprint.can_be(optimizer, self._params):
            return False
        # Later the fingerprint looks at the parameters' own state, before the next step.
        if not all([batch.is_as_made() for batch in self._plain]) or not self.rest():
            return False
        self._fingerprint = Fingerprint(optimizer, self._params, self._stores, is_part=self._is_part)
        return True

    def rest(self) -> bool:
        """After a step, free the copies; return whether the batches can be stepped again."""
        if not all([*[batch.is_settled for batch in self._plain], *[batch.is_settled for batch in self._fused]]):
            return False
        for room, _ in self._rooms:
            room.untyped_storage().resize_(0)
        return True

    def fits(self, optimizer: Optimizer) -> Gradients | None:
        """Whether the next step can use these batches: return its gradients if nothing else but options has changed."""
        found = None if self._fingerprint is None else self._fingerprint.look(optimizer)
        if found is None or not all([batch.fits(optimizer.param_groups) for batch in self._fused]):
            return None
        if not functools.reduce(or_, found.addresses, 0) % _ALIGNED:
            return found
        takes = [batch.takes for batch in self._fused] + [table.takes for table in self._tables]
        return found if all([each(found.addresses) for each in takes]) else None
