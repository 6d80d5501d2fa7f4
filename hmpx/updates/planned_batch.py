"""One batch of a step in slices that is remembered: FP32 shadows of segments, and what C kernels are told of them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.keys import name_id
from hmpx.updates.held_state import is_coded
from hmpx.updates.segment import Segment
from hmpx.updates.state_forms import form_of
from hmpx.updates.weights import StepStore

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16, FP32 = torch.bfloat16, torch.float32

_APART = 16  # elements: each shadow begins at a multiple of it
_BARE = ("stochastic", "nearest")  # ways that keep nothing beside the weights
_AS_FP32 = ("master",)  # ways that keep them as they are stepped


class Shown(NamedTuple):
    """One segment, as the optimizer sees it.

    Attributes:
        shadow: FP32 weights.
        grad: FP32 gradients, copied from BF16 ones; None where the parameter's own are shown.
        state: the shadow's; None where that is the parameter's own dict, or where there is none.
    """

    segment: Segment
    shadow: Tensor
    grad: Tensor | None
    state: dict[str, Any] | None


class Count(NamedTuple):
    """A count of steps of a parameter that is stepped in slices.

    Attributes:
        clone: what one slice sees.
        is_last: whether that is the last slice, of which the parameter keeps what is left.
    """

    clone: Tensor
    own: Tensor
    is_last: bool


class PlannedBatch:
    """What the optimizer sees at once; under `torch.no_grad()`.

    Args:
        segments: as `can_be_planned` wants them; gradients are there.
        states: of the optimizer.
        group: of each parameter; of so many `groups`, as one may be empty.
        room: FP32, with at least `room_for` elements.
        store: of the weights.

    lists: the shadows of each group.
    counts: of the steps, where slices see them.
    watched: state tensors and masters that are shown, each with the name of the parameter.
    written: BF16 tensors that are rounded to.
    read, stored: what the weight store reads and writes.
    """

    def __init__(
        self,
        segments: list[Segment],
        states: Mapping[Any, Any],
        group: dict[Parameter, int],
        groups: int,
        room: Tensor,
        store: StepStore,
    ) -> None:
        self._room, self._at, self._store = room, 0, store
        self._copied: list[tuple[int, int, int]] = []  # BF16 to FP32: pointer, place in the room, elements
        self._rounded: list[tuple[int, Tensor, str, Segment]] = []  # back: place, tensor, name in the key
        self.counts: list[Count] = []
        self._copied += [(0, -1, segment.count) for segment in segments if _is_copied(segment)]
        self.shown = [self._show(segment, states.get(segment.param)) for segment in segments]
        grads = [each.grad for each in self.shown if each.grad is not None]
        for i, grad in enumerate(grads):
            self._copied[i] = 0, int(grad.storage_offset()), grad.numel()
        self._grads = [(s.param, s.offset * BF16.itemsize) for s, _, grad, _ in self.shown if grad is not None]
        self._ready = [(segment, shadow) for segment, shadow, grad, _ in self.shown if grad is None]
        self._places = [4 * at for _, at, _ in self._copied], [4 * at for at, *_ in self._rounded]
        self._widen, self._round = array("Q"), array("Q")
        for pointer, _, count in self._copied:
            self._widen.extend((pointer, 0, count))
        for _, out, name, segment in self._rounded:
            self._round.extend((0, out.data_ptr(), segment.count, name_id(name), segment.at, segment.count, 0))
        self.lists: list[list[Tensor]] = [[] for _ in range(groups)]
        for each in self.shown:
            self.lists[group[each.segment.param]].append(each.shadow)
        self.names = [segment.name for segment in segments]
        self.watched = [
            (value, each.segment.name)
            for each in self.shown
            for value in (states.get(each.segment.param) or {} if each.state is None else each.state).values()
            if isinstance(value, Tensor)
        ]
        self.watched += [
            (each.shadow, each.segment.name)
            for each in self.shown
            if own_fp32(each.segment, states.get(each.segment.param), store)
        ]
        self.written = [out for _, out, *_ in self._rounded]
        self.read = [each for each in self.shown if each.segment.way.weights not in _BARE]
        self.stored = [each for each in self.shown if each.segment.way.weights != "stochastic"]
        del self._room, self._store

    def moved(self, address: int) -> None:
        """The room is at this address."""
        self._widen[1::3] = array("Q", [address + at for at in self._places[0]])
        self._round[0::7] = array("Q", [address + at for at in self._places[1]])

    def widen(self) -> None:
        """Bring BF16 weights, gradients and state to FP32, but for weights that the store reads."""
        for segment, shadow in self._ready:
            shadow.grad = segment.of(segment.grad).data
        places = [p.grad.data_ptr() + at for p, at in self._grads]  # type: ignore[union-attr]  # a plan sees that it is there
        self._widen[0 : 3 * len(places) : 3] = array("Q", places)
        native.widen_words(self._widen)

    def round(self, step_key: int) -> None:
        """Round weights and state to BF16."""
        if self._round:
            native.round_words(self._round, step_key)
            torch.autograd.graph.increment_version(self.written)

    def _show(self, segment: Segment, before: dict | None) -> Shown:
        p, way = segment.param, segment.way.weights
        held = segment.of(p.detach())
        masters = own_fp32(segment, before, self._store)
        shadow, place = (segment.of(masters[0]).data, -1) if masters else self._view(held)
        if way in _BARE:
            self._copied.append((held.data_ptr(), place, segment.count))
        if way == "stochastic":
            self._rounded.append((place, held, segment.name, segment))
        grad = self._view(held)[0] if _is_copied(segment) else None
        shadow.grad = grad
        return Shown(segment, shadow, grad, None if shows_own(segment, before) else self._state(segment, before or {}))

    def _state(self, segment: Segment, before: dict) -> dict[str, Any]:
        state = {}
        for key, value in before.items():
            if value.shape == segment.param.shape:
                state[key] = part = segment.of(value)
                if not form_of(segment).as_left:
                    state[key], place = self._view(part)
                    self._copied.append((part.data_ptr(), place, segment.count))
                    self._rounded.append((place, part, f"{segment.name}.{key}", segment))
            elif segment.start is None:
                state[key] = value
            else:
                self.counts.append(Count(value.clone(), value, segment.is_last))
                state[key] = self.counts[-1].clone
        return state

    def _view(self, like: Tensor) -> tuple[Tensor, int]:
        """FP32 of the shape of another tensor, with a version of its own, and its place in the room."""
        begin, count = self._at, like.numel()
        self._at += _padded(count)
        return self._room[begin : begin + count].view(like.shape).data, begin


def shows_own(segment: Segment, state: dict | None) -> bool:
    """Whether the optimizer is shown the parameter's own state."""
    return state is None or (segment.start is None and form_of(segment).as_left)


def own_fp32(segment: Segment, state: dict | None, store: StepStore) -> list[Tensor]:
    """The FP32 weights of a parameter, which the optimizer can be shown themselves; none if there are none.

    Only beside state that it is shown itself, too: a step that raises has written to that first, and is marked.
    """
    is_shown = segment.way.weights in _AS_FP32 and form_of(segment).as_left and state
    held = store.held(segment.param) if is_shown else []
    return [each for each in held if each.is_contiguous() and each.shape == segment.param.shape]


def can_be_planned(segment: Segment, state: Any) -> bool:
    """Whether the kernels can read a segment whose parameter has this state, and write it."""
    p, form = segment.param, form_of(segment)
    if segment.order is not None or segment.box is not None or segment.overlaps is not None or p.numel() >= 2**32:
        return False
    if not p.is_contiguous() or segment.way.state_dtype == "8bit" or is_coded(state):
        return False
    if shows_own(segment, state):
        return True
    for value in state.values():
        if not isinstance(value, Tensor) or not p.dim():
            return False
        if value.dim() and (value.shape != p.shape or value.dtype is not (FP32 if form.as_left else BF16)):
            return False
    return True


def room_for(segments: list[Segment], states: Mapping[Any, Any], store: StepStore) -> int:
    """How many FP32 numbers a batch takes."""
    total = 0
    for segment in segments:
        copies = _is_copied(segment) + (not own_fp32(segment, states.get(segment.param), store))
        if not form_of(segment).as_left:
            copies += sum(value.dim() > 0 for value in (states.get(segment.param) or {}).values())
        total += copies * _padded(segment.count)
    return total


def _is_copied(segment: Segment) -> bool:
    return segment.grad.dtype is BF16


def _padded(count: int) -> int:
    return -(-count // _APART) * _APART
