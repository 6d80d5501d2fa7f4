"""One batch of a step in slices that is remembered: FP32 shadows of segments, and what C kernels are told of them."""

from __future__ import annotations

from array import array
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import optim

from hmpx.rounding import native
from hmpx.rounding.keys import name_id
from hmpx.updates.block_layout import Layout
from hmpx.updates.held_state import CODES, SCALES
from hmpx.updates.segment import Segment
from hmpx.updates.state_forms import form_of
from hmpx.updates.weights import StepStore

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
BF16, FP32 = torch.bfloat16, torch.float32

_APART = 16  # elements: each shadow begins at a multiple of it


class Shown(NamedTuple):
    """One segment, as the optimizer sees it.

    Attributes:
        shadow: FP32 weights.
        grad: FP32 gradients, copied from BF16 ones; None where the parameter's own are shown.
        state: the shadow's; None where that is the parameter's own dict, or where there is none.
        own: the parameter's own dict, if the optimizer is shown that; `content` is what it has in it.
    """

    segment: Segment
    shadow: Tensor
    grad: Tensor | None
    state: dict[str, Any] | None
    own: dict[str, Any] | None
    content: dict[str, Any]


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
        places: of the plan's parameters, in the order in which it knows their gradients.
        group: the index of each parameter's.
        room: FP32, with at least `room_for` elements.
        store: of the weights.

    Attributes:
        lists: the shadows of each group.
        states: what the optimizer is shown of the state, by shadows.
        counts: of the steps, where slices see them.
        watched: state tensors and masters that are shown, each with the name of the parameter.
    """

    def __init__(
        self,
        segments: list[Segment],
        optimizer: optim.Optimizer,
        places: dict[Parameter, int],
        group: dict[Parameter, int],
        room: Tensor,
        store: StepStore,
    ) -> None:
        self._room, self._at, self._optimizer, self._store = room, 0, optimizer, store
        self.counts: list[Count] = []
        self._words, self._places = array("Q"), list[tuple[int, int]]()
        copied = [segment for segment in segments if _is_copied(segment)]  # the first of the words
        self._copied = [places[segment.param] for segment in copied]
        grads = {segment: self._open(segment, native.Held(segment.grad, native.BF16)) for segment in copied}
        self._written: list[Tensor] = []
        self.shown = [self._show(each, grads.get(each), optimizer.state.get(each.param)) for each in segments]
        self._grads = [each.grad for each in self.shown]
        self._ready = [(each.segment, each.shadow) for each in self.shown if each.grad is None]
        self.lists: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        for each in self.shown:
            self.lists[group[each.segment.param]].append(each.shadow)
        self.states: dict[Tensor, dict[str, Any]] = {}
        for each in self.shown:
            self.show_again(each)
        self.names = [segment.name for segment in segments]
        self.watched = [
            (value, each.segment.name)
            for each in self.shown
            for value in (each.content if each.state is None else each.state).values()
            if isinstance(value, Tensor)
        ]
        self.watched += [
            (each.shadow, each.segment.name)
            for each in self.shown
            if own_fp32(each.segment, optimizer, store) is not None
        ]
        del self._room, self._optimizer, self._store

    def moved(self, address: int) -> None:
        """The room is at this address."""
        native.show_at(self._words, [address * in_room + at for in_room, at in self._places])

    def show_again(self, each: Shown) -> None:
        """Show this state at the next step: the optimizer has put something else into the dict that it was shown."""
        if each.own is not None:
            self.states[each.shadow] = each.own
        elif each.state is not None:
            self.states[each.shadow] = each.state.copy()

    def states_left(self, states: dict) -> list[dict[str, Any] | None]:
        """What the optimizer has left of `states`, by shadows, all of which leave its state.

        To update a dict with another one, and to take the last items of one, hashes no keys: tensors do that in Python.
        """
        shadows = [each.shadow for each in self.shown]
        if len(states) >= len(shadows) and all(map(is_, reversed(states), reversed(shadows))):
            return [states.popitem()[1] for _ in shadows][::-1]
        return [states.pop(shadow, None) for shadow in shadows]

    def read(self, gradients: list[int]) -> list[Any]:
        """Bring weights, gradients and state to FP32.

        gradients: where those of the plan's parameters are.

        Returns:
            The gradients that the optimizer is shown.
        """
        for segment, shadow in self._ready:
            shadow.grad = segment.of(segment.grad).data
        native.hold_at(self._words, [gradients[i] for i in self._copied])
        native.read_words(self._words)
        return [each.shadow.grad for each in self.shown] if self._ready else self._grads

    def forget_gradients(self) -> None:
        """Let go of the parameters' own ones, which nothing is to hold between two steps."""
        for _, shadow in self._ready:
            shadow.grad = None

    def write(self, step_key: int) -> None:
        """Write weights and state back."""
        native.write_words(self._words, len(self._copied), step_key)
        torch.autograd.graph.increment_version(self._written)

    def _show(self, segment: Segment, grad: Tensor | None, before: dict | None) -> Shown:
        held, masters = self._store.kept(segment), own_fp32(segment, self._optimizer, self._store)
        assert held is not None, "the segment can be planned"
        if masters is None:
            shadow = self._open(segment, held)
        else:
            shadow = segment.of(masters).data
            self._tell(segment, held, (0, shadow.data_ptr()))
        self._written.append(held.tensor)
        shadow.grad = grad
        if shows_own(segment, before):
            return Shown(segment, shadow, grad, None, before, dict(before or {}))
        return Shown(segment, shadow, grad, self._state(segment, before or {}), None, {})

    def _state(self, segment: Segment, before: dict) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, value in before.items():
            if key.startswith(SCALES):
                continue
            if key.startswith(CODES):
                own = key.removeprefix(CODES)
                scales, row = before[SCALES + own], Layout.of(value).rows.width
                state[own] = self._open_state(segment, own, native.Held(value, native.CODED, beside=scales, row=row))
            elif value.shape != segment.param.shape:
                state[key] = value if segment.start is None else self._count(segment, value)
            elif form_of(segment).as_left:
                state[key] = segment.of(value)
            else:
                state[key] = self._open_state(segment, key, native.Held(value, native.BF16))
        return state

    def _open_state(self, segment: Segment, key: str, held: native.Held) -> Tensor:
        self._written.append(held.tensor)
        return self._open(segment, held._replace(name=name_id(f"{segment.name}.{key}")))

    def _count(self, segment: Segment, value: Tensor) -> Tensor:
        self.counts.append(Count(value.clone(), value, segment.is_last))
        return self.counts[-1].clone

    def _open(self, segment: Segment, held: native.Held) -> Tensor:
        """A segment of what is held, in FP32: in the room, with a version of its own."""
        begin, like = self._at, segment.of(held.tensor)
        self._at += _padded(segment.count)
        self._tell(segment, held, (1, begin * FP32.itemsize))
        return self._room[begin : begin + segment.count].view(like.shape).data

    def _tell(self, segment: Segment, held: native.Held, place: tuple[int, int]) -> None:
        """Have the kernels show what is held at a place: bytes from the room's address on, or from 0."""
        self._words.extend(native.shown_words(held, segment.offset, segment.count))
        self._places.append(place)


def shows_own(segment: Segment, state: dict | None) -> bool:
    """Whether the optimizer is shown the parameter's own state."""
    return state is None or (segment.start is None and form_of(segment).as_left)


def own_fp32(segment: Segment, optimizer: optim.Optimizer, store: StepStore) -> Tensor | None:
    """The FP32 weights of a parameter, if the optimizer can be shown them themselves.

    Only beside state that it is shown itself, too, and where it is torch's own: a step that raises has then raised a
    version before, and is marked. Lion writes to ``p.data``, which has no version that anybody sees.
    """
    held = store.kept(segment)
    if held is None or held.kind != native.MASTER or not type(optimizer).__module__.startswith("torch.optim."):
        return None
    return held.beside if form_of(segment).as_left and optimizer.state.get(segment.param) else None


def can_be_planned(segment: Segment, state: Any, store: StepStore) -> bool:
    """Whether the kernels can read a segment whose parameter has this state, and write it."""
    p, form = segment.param, form_of(segment)
    if segment.order is not None or segment.box is not None or segment.overlaps is not None or p.numel() >= 2**32:
        return False
    if not native.is_plain(p) or store.kept(segment) is None:
        return False
    if shows_own(segment, state):
        return True
    in_8_bits = segment.way.state_dtype == "8bit"
    for key, value in state.items():
        if not isinstance(value, Tensor) or not p.dim():
            return False
        if in_8_bits and key.startswith((CODES, SCALES)):
            continue
        if value.dim() and (in_8_bits or value.shape != p.shape or value.dtype is not (FP32 if form.as_left else BF16)):
            return False
    return True


def room_for(segments: list[Segment], optimizer: optim.Optimizer, store: StepStore) -> int:
    """How many FP32 numbers a batch takes."""
    total = 0
    for segment in segments:
        copies = _is_copied(segment) + (own_fp32(segment, optimizer, store) is None)
        if not form_of(segment).as_left:
            state = optimizer.state.get(segment.param) or {}
            copies += sum(value.dim() > 0 and not key.startswith(SCALES) for key, value in state.items())
        total += copies * _padded(segment.count)
    return total


def _is_copied(segment: Segment) -> bool:
    return segment.grad.dtype is BF16


def _padded(count: int) -> int:
    return -(-count // _APART) * _APART
