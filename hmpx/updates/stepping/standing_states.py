"""The state of the parameters that a kept plan for unknown classes steps: what the optimizer sees, and what it leaves.

State that is held as a step leaves it is shown in the parameters' own dicts. Of other state, dicts with FP32 copies in
the room stand from one step to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import chain, compress, islice, repeat
from operator import is_, is_not, itemgetter
from typing import Any

import torch

from hmpx.base.torch_private import copy_all
from hmpx.rounding.state_codes import is_coded
from hmpx.updates.holding.held import Held, HeldCodes, HeldState, HeldTensor, Segment, held_states
from hmpx.updates.holding.state_dtypes import is_bf16, is_moment
from hmpx.updates.holding.state_forms import InCodes, form_of
from hmpx.updates.stepping.optimizer_classes import by_memory
from hmpx.updates.stepping.plan import Fingerprint, Gradients, is_seen
from hmpx.updates.stepping.step_call import are_same, grads_of, nested, values_of
from hmpx.updates.stepping.transfers import Piece

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer
FP32 = torch.float32
_TOGETHER = 1 << 24  # elements that are compared at once on an accelerator
_PLAIN_VALUES = frozenset({int, float, bool, str, type(None)})


class Unfit(Exception):
    """An optimizer that cannot have such a plan as it is now, and why."""


def need(condition: object, otherwise: str) -> None:
    """
    Raises:
        Unfit: the condition does not hold; `otherwise` says what is there in its place.
    """
    if not condition:
        raise Unfit(otherwise)


def picker(of: Sequence[bool]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a function that takes some items out of a list, in one call in C."""
    indices = [i for i, one in enumerate(of) if one]
    if len(indices) > 1:
        return itemgetter(*indices)
    return (lambda items: (items[indices[0]],)) if indices else (lambda items: ())


class StandingFingerprint(Fingerprint):
    """The optimizer between two steps. Gradients may come and go, and numbers in state may change.

    Args:
        params: those that have shadows.
        held: tensors whose memory the table of the kernels has.
        has_copies: whether some state is shown as copies, so that its objects may not change either.
    """

    def __init__(self, optimizer: Optimizer, params: list[Parameter], held: list[Tensor], has_copies: bool) -> None:
        self._look_at_members(optimizer, params, is_part=False)
        self._one_layout, self._has_copies = by_memory(optimizer), has_copies
        self._keys_of_states = list(self._states)
        self._dicts = [self._states[p] for p in params if p in self._states]
        self._own_keys = list(chain(*self._dicts))
        self.values = values_of(self._dicts)
        tensors = [isinstance(value, Tensor) for value in self.values]
        self._tensors_of, self._others_of = picker(tensors), picker([not each for each in tensors])
        self._types = list(map(type, self._others_of(self.values)))
        self._look_at_memory(held, () if has_copies else self._tensors_of(self.values))

    def gradients_if_unchanged(self, optimizer: Optimizer) -> Gradients | None:
        if by_memory(optimizer) != self._one_layout or len(list(nested(optimizer))) != 1:
            return None
        return super().gradients_if_unchanged(optimizer)

    def _has_state(self) -> bool:
        states, count = self._states, len(self._dicts)
        if not are_same(states, self._keys_of_states):
            return False
        if not all(map(is_, islice(states.values(), len(states) - count, None), self._dicts)):
            return False
        if list(chain.from_iterable(self._dicts)) != self._own_keys:
            return False
        values = values_of(self._dicts)
        if self._has_copies:
            return all(map(is_, values, self.values))
        self.values, self._replaceable = (
            values,
            self._tensors_of(values),
        )  # no `is`: `Guards` compares class, dtype and shape
        return list(map(type, self._others_of(values))) == self._types

    def take(self) -> bool:
        """After a step, take its state for granted; return whether there is as much of it as there was.

        Where the step sees no copies of state, it may replace tensors, and none is held.
        """
        self.values = values_of(self._dicts) if self._has_copies else []
        self._replaceable = ()
        return sum(map(len, self._dicts)) == len(self._own_keys)

    def _found(self) -> list[Any]:
        """Return the gradients. Where there is none, the weights stand for it: these have its size."""
        found = grads_of(self._params)
        if all(map(is_not, found, repeat(None))):
            return found
        return [p.detach() if grad is None else grad for p, grad in zip(self._params, found, strict=True)]

    def _has_these(self, grads: list[Tensor]) -> bool:
        return True


class StandingStates:
    """The state of parameters, between steps and in them.

    Args:
        states: of the optimizer.
        place: makes a piece: a copy in the room.
        weight_keys: of state that is weights, which the step is shown themselves.

    Attributes:
        own: of each parameter that has state, its dict.
        pieces: the tensors of which copies are shown.
        held: their memory.
        copies: the dicts with copies.

    Raises:
        Unfit: some state cannot be shown so.
    """

    def __init__(
        self,
        states: dict[Any, Any],
        segments: list[Segment],
        place: Callable[[Held, Segment, str], Piece],
        weight_keys: Set[str],
    ) -> None:
        self._states, self._place, self.weight_keys = states, place, weight_keys
        self.own = {each.param: state for each in segments if (state := states.get(each.param)) is not None}
        self._others = len(states) - len(self.own)
        need(are_same(list(states)[self._others :], self.own), "its states are in another order than its parameters")
        self.pieces, self.held = list[Piece](), list[Tensor]()
        self.given, is_copy, names = list[dict[str, Any]](), list[bool](), list[str]()
        for segment in segments:
            if (own := self.own.get(segment.param)) is not None:
                is_copy.append(not form_of(segment).as_left)
                self.given.append(self._copies_of(own, segment) if is_copy[-1] else self._itself(own, segment))
                names += [segment.name] * len(own)
        self.copies = list(compress(self.given, is_copy))
        self._own_of_copies = list(compress(self.own.values(), is_copy))
        self._keys_of_own = list(map(list, self.own.values()))
        # What the optimizer works on itself, of all values in the parameters' own dicts
        held, values = set(map(id, self.held)), values_of(self.own.values())
        are_own = [isinstance(value, Tensor) and id(value) not in held for value in values]
        self._worked_on, self._names = picker(are_own), list(compress(names, are_own))

    def _itself(self, own: Any, segment: Segment) -> dict[str, Any]:
        _refuse_odd(own)
        laid = [v for v in own.values() if isinstance(v, Tensor) and v.shape == segment.param.shape]
        need(
            not any(map(is_bf16, own.values())) and not is_coded(own),
            "state that is FP32 by its form is held otherwise",
        )
        need(all([v.is_contiguous() for v in laid]), "a state tensor is not contiguous")
        return own

    def _copies_of(self, own: Any, segment: Segment) -> dict[str, Any]:
        _refuse_odd(own)
        shown, in_codes = dict[str, Any](), isinstance(form_of(segment), InCodes)
        for key, held in held_states(own, segment.param).items():
            is_held, name = isinstance(held, HeldState), f"{segment.name}.{key}"
            shown[key] = value = held.tensor if is_held else held
            need(not is_held or type(held) in (HeldTensor, HeldCodes), f"{key!r} is held in another way than whole")
            if isinstance(held, HeldCodes):
                need(
                    held.code.is_stable, f"{key!r} is in a code that rounds again what it has rounded"
                )  # others are compared with what was held, before they are rounded again
                self.held += held.tensor, held.scales
            elif is_bf16(value):
                need(
                    value.dim() and value.is_contiguous() and not in_codes,
                    f"{key!r} is a BF16 scalar, or not contiguous",
                )
                self.held.append(value)
            else:  # shown itself: a count or a mask, a moment that codes leave in FP32, weights
                need(
                    not is_moment(value)
                    or (in_codes and not is_held)
                    or (key in self.weight_keys and value.is_contiguous()),
                    f"{key!r} is an FP32 moment beside BF16 state",
                )
                continue
            # Factored moments are pieces of their own shape
            of_piece = segment if is_held else Segment(value, name)
            shown[key] = self._place(held if is_held else HeldTensor(value), of_piece, name)
            self.pieces.append(shown[key])
        return shown

    def stand(self, shadow_of: dict[Parameter, Parameter]) -> None:
        """Put the copies into the dicts, once the room is there. shadow_of: the shadow of each parameter."""
        in_room = {id(piece.x) for piece in self.pieces}
        for shown in self.copies:
            shown.update({key: value.x for key, value in shown.items() if isinstance(value, Piece)})
        self._keys, values = list(chain(*self.copies)), values_of(self.copies)
        are_pieces = [id(value) in in_room for value in values]
        self._moved_of, self._unmoved_of = picker(are_pieces), picker([not each for each in are_pieces])
        self.moved, self._unmoved = self._moved_of(values), self._unmoved_of(values)
        pairs = zip(self._own_of_copies, self.copies, strict=True)
        self._places_of_unmoved = self._unmoved_of([(own, key) for own, shown in pairs for key in shown])
        self._new = {shadow_of[p]: given for p, given in zip(self.own, self.given, strict=True)}

    def begin(self, values: list[Any]) -> None:
        """Remember what the parameters' dicts hold when a step begins: all their values, or none between steps."""
        self._before = values

    def content(self) -> list[dict[str, Any]]:
        """Return the parameters' dicts as they were when the step began."""
        values = iter(self._before)
        return [dict(zip(keys, values, strict=False)) for keys in self._keys_of_own]

    def worked_on(self) -> Sequence[Tensor]:
        """Return the tensors that the optimizer is shown themselves."""
        return self._worked_on(self._before)

    def versioned(self) -> list[tuple[Tensor, str]]:
        """Return the same, each with the name of its parameter."""
        return list(zip(self.worked_on(), self._names, strict=True))

    def show(self) -> None:
        """Put what is shown under the keys of the shadows. A class may go over its state, so nothing else is there."""
        states = self._states
        self._others_before = dict(islice(states.items(), self._others))
        states.clear()
        states.update(self._others_before)
        states.update(self._new)  # a dict knows the hashes of its keys, which tensors compute in Python

    def show_others(self) -> None:
        """After an error, put back what is not the parameters' state."""
        for key, state in self._others_before.items():
            self._states.setdefault(key, state)

    def are_as_shown(self, room: Tensor) -> bool:
        """Return whether kernels can write the state as it was left. Replaced tensors are copied to their places."""
        states = self._states
        if not are_same(states, [*self._others_before, *self._new]):
            return False
        if not all(map(is_, islice(states.values(), self._others, None), self.given)):
            return False
        if list(chain(*self.copies)) != self._keys:
            return False
        values = values_of(self.copies)
        moved = self._moved_of(values)
        if not all(map(is_, moved, self.moved)):
            pairs = [(shown, now) for shown, now in zip(self.moved, moved, strict=True) if shown is not now]
            if not all([_fits(now, shown, room) for shown, now in pairs]):
                return False
            copy_all([shown for shown, _ in pairs], [now for _, now in pairs])
            standing = {id(now): shown for shown, now in pairs}
            for state in self.copies:
                state.update({key: standing[id(value)] for key, value in state.items() if id(value) in standing})
        self._left = self._unmoved_of(values)
        return all(map(is_, self._left, self._unmoved)) or all(map(_may_stand_for, self._left, self._unmoved))

    def take(self) -> None:
        """Put the parameters' state back under their keys, with the numbers that the step has left."""
        others = dict(islice(self._states.items(), self._others))
        self._states.clear()
        self._states.update(others)
        self._states.update(self.own)
        if not all(map(is_, self._left, self._unmoved)):
            for (own, key), left, before in zip(self._places_of_unmoved, self._left, self._unmoved, strict=True):
                if left is not before:
                    own[key] = left
            self._unmoved = self._left


def _refuse_odd(own: Any) -> None:
    need(type(own) is dict and all([type(key) is str for key in own]), "a state is no dict of names")
    for value in own.values():
        is_tensor = isinstance(value, Tensor)
        need(
            is_seen(value) and not value.requires_grad if is_tensor else type(value) in _PLAIN_VALUES,
            f"a state holds a {type(value).__name__}",
        )


def _fits(now: Any, shown: Tensor, room: Tensor) -> bool:
    """Return whether a tensor that a step has put in the place of a copy can be copied there."""
    if type(now) is not Tensor or now.dtype is not FP32 or now.shape != shown.shape or now.layout is not torch.strided:
        return False
    return now.untyped_storage().data_ptr() != room.untyped_storage().data_ptr()


def _may_stand_for(now: Any, before: Any) -> bool:
    """Return whether a value may take the place of another one that is held as a step leaves it."""
    if now is before or type(now) is not type(before) or not isinstance(now, Tensor):
        return type(now) is type(before)
    is_like = now.dtype is before.dtype and now.device == before.device and not now.requires_grad
    return is_like and not now.dim() and not before.dim()


def are_equal(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """Return whether these have the same bits, by few launches."""
    number = {2: torch.int16, 4: torch.int32}[tensors[0].element_size()]
    begin, size = 0, 0
    for end, each in enumerate(tensors, 1):
        size += each.numel()
        if size >= _TOGETHER or end == len(tensors):
            both = [torch.cat([x.detach().reshape(-1) for x in of[begin:end]]).view(number) for of in (tensors, before)]
            if not torch.equal(*both):
                return False
            begin, size = end, 0
    return True
