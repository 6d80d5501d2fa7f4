"""A step in batches: all batches of an optimizer's parameters, kept from one step to the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hmpx.rounding.xla import is_lazy
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.state_tensors import held, is_coded
from hmpx.updates.ranks.sharding import held_part, local
from hmpx.updates.stepping.batch import Batch
from hmpx.updates.stepping.batching import batches_of
from hmpx.updates.stepping.fingerprint import Fingerprint
from hmpx.updates.stepping.fused_batch import FusedBatch, formula_for, takes
from hmpx.updates.stepping.gathered_batch import GatheredBatch
from hmpx.updates.stepping.interrupts import mark_incomplete
from hmpx.updates.stepping.optimizer_scope import scope_of
from hmpx.updates.stepping.shown import Around
from hmpx.updates.stepping.step_call import StepCall, WriteBack

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class Members:
    """The parameters of an optimizer: the segment of each BF16 one, whole, and the index of each one's group."""

    def __init__(self, optimizer: Optimizer, segments: list[Segment]) -> None:
        self.whole = {segment.param: segment for segment in segments}
        self.group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.elements = sum([local(p).numel() for p in self.group])


class BatchedStep:
    """The batches of parameters that have gradients; under `torch.no_grad()`. It does not hold the optimizer.

    Args:
        params: those that are to be stepped.
        fused: whether parameters that a fused kernel can step are stepped by it.
    """

    def __init__(
        self, optimizer: Optimizer, members: Members, params: list[Parameter], write_back: WriteBack, *, fused: bool
    ) -> None:
        self._params, self._stores, self._members = params, write_back.stores, members
        segments = [members.whole[p] for p in params if p in members.whole]
        for segment in segments:
            self._stores.of(segment).begin()
        places = {p: i for i, p in enumerate(params)}
        around = Around(optimizer, self._stores, places, self._gradients(), members.group, {})
        kernel = _by_kernel(optimizer, segments, members.group) if fused else []
        self._late, self._fused = around.late, _fused_batches(kernel, around, write_back) if kernel else []
        self._batches: list[Batch | GatheredBatch] = []
        self._rooms: list[tuple[Tensor, int]] = []
        of_kernels = {segment.param for segment in kernel}
        rest: dict[torch.device, list[Segment]] = {}
        for segment in segments:
            if segment.param not in of_kernels:
                rest.setdefault(segment.param.device, []).append(segment)
        others = [(members.group[p], p) for p in params if p not in members.whole]
        for device, here in rest.items():
            self._add(here, device, around, others)
            others = []
        if others:
            self._add([], torch.device("cpu"), around, others)
        counts = [count for batch in self._plain for count in batch.counts]
        self._counts = [count.clone for count in counts], [count.own for count in counts]
        last = [count for count in counts if count.is_last]
        self._last = [count.own for count in last], [count.clone for count in last]
        self._fingerprint: Fingerprint | None = None

    @property
    def _plain(self) -> list[Batch]:
        return [batch for batch in self._batches if isinstance(batch, Batch)]

    def _add(
        self, segments: list[Segment], device: torch.device, around: Around, others: list[tuple[int, Parameter]]
    ) -> None:
        """Make the batches of one device, with a room that serves all of them, and `others` in the first."""

        def beside(segment: Segment) -> list[Tensor]:
            p, state = segment.param, around.optimizer.state.get(segment.param)
            own = [v for v in state.values() if isinstance(v, Tensor)] if isinstance(state, dict) else []
            kept = [v for v in around.stores.of(segment).beside() if v.shape == local(p).shape]
            return [around.gradients[around.places[p]], *(local(v) for v in own if v.shape == p.shape), *kept]

        batches: list[Batch] = []
        for cut in batches_of(segments, around.optimizer, self._members.elements, beside):
            if cut[0].is_gathered:
                self._batches.append(GatheredBatch(cut[0], around))
            else:
                batches.append(Batch(cut, around))
                self._batches.append(batches[-1])
        if others:
            if not batches:
                batches.append(Batch([], around))
                self._batches.append(batches[-1])
            batches[0].others = others
        # Each parameter has one transfer: the parts that it is cut into share a checksum, or a block of codes.
        kernels = [batch.kernels() for batch in batches]
        copied = {s.param for batch, own in zip(batches, kernels, strict=True) if own is None for s in batch.segments}
        room = torch.empty(max([batch.size for batch in batches], default=0), dtype=torch.float32, device=device)
        for batch, own in zip(batches, kernels, strict=True):
            batch.place_in(room, own if copied.isdisjoint([segment.param for segment in batch.segments]) else None)
        self._rooms.append((room, room.nbytes))

    def _gradients(self) -> list[Tensor]:
        """This rank's part of each parameter's gradient; a gradient that is cut in another way is redistributed."""
        found = []
        for p in self._params:
            assert p.grad is not None, "only parameters with gradients are stepped"
            found.append(p.grad if type(p.grad) is Tensor else held_part(p, p.grad))
        return found

    def run(self, call: StepCall, write_back: WriteBack, written: list[str]) -> None:
        """Take the step. If it raises after something was written, the optimizer is marked incomplete.

        written: gets the names of parameters of which something has changed.
        """
        write_back = write_back.deferred()
        if self._fingerprint is not None:
            for room, size in self._rooms:
                room.untyped_storage().resize_(size)
        gradients = self._gradients()
        self._late.clear()
        try:
            for batch in self._fused:
                batch.begin(call)
            if self._counts[0]:
                torch._foreach_copy_(*self._counts)
            for each in (*self._batches, *self._fused):
                each.step(call, write_back, gradients, written)
            if self._last[0]:
                torch._foreach_copy_(*self._last)
        except BaseException as error:
            if written:
                mark_incomplete(call.optimizer, write_back.rounding_key.step, written, error)
            raise  # with its memory, which whoever shows a traceback's tensors reads

    def keep(self, optimizer: Optimizer) -> bool:
        """After the first step, take the fingerprint; whether the batches can be stepped again."""
        if len(self._plain) < len(self._batches) or not Fingerprint.can_be(optimizer, self._params):
            return False
        if not self.rest():
            return False
        self._fingerprint = Fingerprint(optimizer, self._params, self._stores.beside())
        return True

    def rest(self) -> bool:
        """After a step, free the copies; whether the batches can be stepped again."""
        batches: list[Batch | FusedBatch] = [*self._plain, *self._fused]
        if not all([each.is_as_made() for each in batches]):
            return False
        for room, _ in self._rooms:
            room.untyped_storage().resize_(0)
        return True

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the next step can use these batches: only gradients and options have changed."""
        if self._fingerprint is None or not self._fingerprint.holds(optimizer, self._stores.beside()):
            return False
        return all([batch.fits(optimizer.param_groups) for batch in self._fused])


def _by_kernel(optimizer: Optimizer, segments: list[Segment], group: dict[Parameter, int]) -> list[Segment]:
    formula, groups, states = formula_for(optimizer), optimizer.param_groups, optimizer.state
    if formula is None:
        return []
    return [s for s in segments if takes(formula, groups[group[s.param]], s, states.get(s.param) or {})]


def _fused_batches(segments: Sequence[Segment], around: Around, write_back: WriteBack) -> list[FusedBatch]:
    """One fused batch for each device; one for each parameter while updates are watched, since that takes copies."""
    formula = formula_for(around.optimizer)
    assert formula is not None, "a kernel takes these parameters"
    together: dict[object, list[Segment]] = {}
    for segment in segments:
        key = segment.param.device if write_back.counts is None else segment.param
        together.setdefault(key, []).append(segment)
    return [FusedBatch(each, formula, around, write_back) for each in together.values()]


def is_uniform(optimizer: Optimizer, segments: list[Segment]) -> bool:
    """Whether all parts of a step will run if the first one does: gradients are dense, and state is of one kind.

    False on XLA, where a step is one graph and the compiler bounds its memory.
    """
    if any(is_lazy(segment.param) for segment in segments):
        return False
    by_element = scope_of(optimizer) == "element"
    for group in optimizer.param_groups:
        kinds: dict[bool, set] = {}
        for p in group["params"]:
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
