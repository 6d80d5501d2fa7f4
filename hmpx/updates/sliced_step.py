"""A step in slices: the optimizer sees a bounded number of elements at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from hmpx.updates.layout import memory_order
from hmpx.updates.optimizer_scope import by_memory
from hmpx.updates.ranks.sharding import held_part, local
from hmpx.updates.segment import Segment
from hmpx.updates.shadow_state import GatheredShadowState, ShadowState
from hmpx.updates.slice_buffers import SliceBuffers
from hmpx.updates.sliced_state import SlicedState
from hmpx.updates.state_forms import form_of
from hmpx.updates.step_call import StepCall, WriteBack
from hmpx.updates.write_counts import raises_versions

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer

_ALIGN = 64  # elements: where a slice begins, vectorised kernels would begin a vector in the whole parameter too
_FLOOR, _CEILING = 1 << 17, 1 << 20
# FP32 weight, gradient, new state and temporaries of this part of the elements are less than 0.5 bytes a parameter.
_PARTS = 60
_PARTS_FUSED, _PARTS_FUSED_READ = 20, 34  # torch's fused kernels have no temporaries; the latter where state is read


def slice_size(elements: int, parts: int = _PARTS) -> int:
    """How many elements of a model with so many the optimizer sees at once: one of so many parts.

    A step then takes up to 0.5 bytes per parameter, or 2 MB if that is more. Smaller slices than `_FLOOR` spend more
    time on calls than on updates; the buffers of larger ones than `_CEILING` do not stay in the cache.
    """
    return min(max(elements // parts, _FLOOR), _CEILING) // _ALIGN * _ALIGN


def cut(
    segments: Iterable[Segment], size: int, parts: Callable[[Segment, int], Iterable[Segment]]
) -> Iterator[list[Segment]]:
    """Batches of at most `size` elements: small parameters together, each large one by itself, in parts of one size.

    The small ones in front come first; those between large ones wait until there are enough of them for a batch.

    Batches of one part after the other lie alike in the buffers, where each thread then finds what it has left there
    itself: cores that share no cache send each other nothing.

    A sharded parameter always goes through `parts`. One that must be gathered is a batch of its own, so that all ranks
    gather in the same order. Parameters that share memory are in different batches, one after the other.

    parts: gets a parameter and the size of a part.
    """
    batch: list[Segment] = []
    room, is_first = size, True
    for segment in segments:
        count = segment.count
        alone = segment.overlaps is not None or count > size // 4
        if batch and (is_first if alone else count > room):
            yield batch
            batch, room = [], size
        is_first = is_first and not alone
        is_cut = segment.box is not None or count > size
        pieces = list(parts(segment, even_part(count, size))) if is_cut else [segment]
        if alone or pieces[0].is_gathered:
            yield from ([piece] for piece in pieces)
            continue
        for piece in pieces:
            batch.append(piece)
            room -= piece.count
    if batch:
        yield batch


def even_part(count: int, size: int) -> int:
    """Into parts of how many elements so many are cut, so that none has more than `size` and the last hardly less."""
    number = max(-(-count // size), 1)
    part = -(-count // number)
    return min(-(-part // _ALIGN) * _ALIGN, size)


class SlicedStep:
    """One step of an optimizer that treats each element, or each parameter, by itself."""

    def __init__(self, call: StepCall, write_back: WriteBack) -> None:
        if write_back.counts is None:  # else each is looked at as soon as it is written
            write_back = write_back.deferred()
        self._call, self._write_back, self._store = call, write_back, write_back.store
        self._optimizer = optimizer = call.optimizer
        self._by_memory = by_memory(optimizer)
        self._group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        with torch.no_grad():
            self._elements = sum(local(p).numel() for p in self._group)
        self._versions: list[dict[str, int] | None] = []  # of the state of each shadow of a batch
        self._is_scaled = getattr(optimizer, "grad_scale", None) is not None  # fused kernels then write to gradients
        self.batches: list[list[Segment]] = []  # that were stepped
        self.written: list[str] = []  # names of parameters whose weights or state may have changed
        self._buffers = SliceBuffers(self._store, self._by_memory)
        self._sliced: dict[Parameter, SlicedState] = {}
        self._others: list[Parameter] = []

    def run(self, segments: list[Segment], others: list[Parameter], by_element: bool) -> None:
        """Step BF16 parameters, each given as one whole segment, on FP32 shadows, and `others` as they are.

        Under `torch.no_grad()`, and without a closure.
        """
        self._others = others
        self._size = slice_size(self._elements, _parts_of(self._optimizer, segments))
        self._buffers.grads.clear()  # of another part of the step: they may have been released
        for segment in segments:
            self._buffers.hold(segment)
        for device in {segment.param.device: None for segment in segments}:
            here = [segment for segment in segments if segment.param.device == device]
            if sum(segment.param.numel() for segment in here) > _FLOOR:  # not what this rank holds: ranks must agree
                here = self._each_group_first(here)
            for batch in cut(here, self._size, self._parts if by_element else lambda segment, _: [segment]):
                self._batch(batch)
        if self._others:
            self._batch([])

    def release(self) -> None:
        """Give the memory of the buffers back: the step is done."""
        self._buffers = SliceBuffers(self._store, self._by_memory)

    def _each_group_first(self, segments: list[Segment]) -> list[Segment]:
        """The smallest parameter of each group first: a wrong setting of a group raises before much is written.

        Parameters that share memory stay in the optimizer's order, which their weights depend on.
        """
        alone = [segment for segment in segments if segment.overlaps is None]
        smallest = {
            self._group[segment.param]: segment for segment in sorted(alone, key=lambda segment: -segment.param.numel())
        }
        first = list(smallest.values())
        return first + [segment for segment in segments if segment not in first]

    def _parts(self, segment: Segment, size: int) -> Iterable[Segment]:
        p = segment.param
        if not p.dim():
            return [segment]
        self._sliced[p] = state = SlicedState(self._optimizer.state, segment, self._write_back)
        together = [local(p), self._buffers.grads[p], *state.tensors(), *self._store.held(p)]
        ends = form_of(segment).ends(p)
        if all(tensor.is_contiguous() for tensor in together):
            return segment.parts(size, None, ends)
        in_memory = segment.box is None and ends is None
        return segment.parts(size, memory_order(p) if in_memory else tuple(range(p.dim())), ends)

    def _batch(self, batch: list[Segment]) -> None:
        states = self._optimizer.state
        shadows = self._buffers.shadows(batch) if batch else []
        others, self._others = self._others, []
        whole: list[ShadowState] = []
        try:
            for segment, shadow in zip(batch, shadows, strict=True):
                if segment.start is None:
                    kind = GatheredShadowState if segment.is_gathered else ShadowState
                    whole.append(kind(self._optimizer, segment, shadow, self._write_back, self._by_memory))
                    whole[-1].show()
                else:
                    self._sliced[segment.param].show(segment, shadow)
            shown = [(segment.param, shadow) for segment, shadow in zip(batch, shadows, strict=True)]
            self._versions = [_versions(states.get(shadow)) for shadow in shadows]
            grads = [(g, g._version) for shadow in shadows if (g := shadow.grad) is not None]
            with self._only([*shown, *((p, p) for p in others)]):
                self._call.run()
        except BaseException:
            self.written += [
                segment.name
                for segment, shadow, before in zip(batch, shadows, self._versions, strict=False)  # none yet, perhaps
                if before and (_versions(states.get(shadow)) != before or not raises_versions(self._optimizer))
            ]
            for state in whole:
                state.undo()
            for shadow in shadows:
                states.pop(shadow, None)
            raise
        self.written += [segment.name for segment in batch]
        self.batches += [batch] if batch else []
        for state in whole:
            state.finish()
        for segment, shadow, grad in zip(batch, shadows, grads, strict=True):
            self._hand_back(segment, shadow.grad, *grad)
            if segment.start is not None:
                self._sliced[segment.param].take_back(segment, shadow)
                if segment.is_last:
                    self._sliced.pop(segment.param).finish()
            segment.mark_written()
            for block, x in segment.blocks(held_part(segment.param, shadow) if segment.is_gathered else shadow):
                self._store.write(block, x, self._write_back.rounding_key)
        self._write_back.rounding_key.flush()

    def _hand_back(self, segment: Segment, left: Tensor | None, shown: Tensor, version: int) -> None:
        """Do to the parameter's gradient what the step did to the shadow's."""
        if left is shown and left._version == version and not self._is_scaled:
            return
        self._buffers.hand_back(segment, left)

    def _only(self, shown: list[tuple[Parameter, Tensor]]) -> OnlyParameters:
        lists: list[list[Tensor]] = [[] for _ in self._optimizer.param_groups]
        for p, q in shown:
            lists[self._group[p]].append(q)
        return OnlyParameters(self._optimizer.param_groups, lists)


class OnlyParameters:
    """`param_groups` hold other parameters inside the block; the lists themselves stay the same objects."""

    def __init__(self, groups: list[dict], lists: list[list[Tensor]]) -> None:
        self._groups, self._lists = groups, lists

    def __enter__(self) -> None:
        self._before = [list(group["params"]) for group in self._groups]
        for group, shown in zip(self._groups, self._lists, strict=True):
            group["params"][:] = shown

    def __exit__(self, *exception: object) -> None:
        for group, before in zip(self._groups, self._before, strict=True):
            group["params"][:] = before


def _parts_of(optimizer: Optimizer, segments: list[Segment]) -> int:
    """In how many parts these parameters are stepped."""
    if not all(group.get("fused") for group in optimizer.param_groups):
        return _PARTS
    return _PARTS_FUSED if all(form_of(segment).as_left for segment in segments) else _PARTS_FUSED_READ


def _versions(state: dict | None) -> dict[str, int] | None:
    """In them it shows whether a step that raised has written to the state; of fused kernels in the count of steps."""
    return state and {key: value._version for key, value in state.items() if isinstance(value, Tensor)}
