"""A chunk: the whole parameters that an optimizer sees in one call of its own step.

The optimizer sees FP32 state itself, and FP32 copies of all else: of weights, gradients and other state (`shadow.py`).
A transfer fills the copies before the call, and writes them back after it. If the optimizer raises, weights, gradients
and state keys are as they were.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_
from types import ModuleType
from typing import Any

import torch

from hmpx.base.tensors import is_lazy
from hmpx.base.torch_private import dispatch_modes, version_of
from hmpx.errors import HmpxError
from hmpx.rounding.table import Table
from hmpx.updates.holding.held import RoundingKey, Segment, by_own_keys
from hmpx.updates.holding.sharding import is_sharded, local
from hmpx.updates.holding.state_dtypes import find_weights, is_moment, weight_keys
from hmpx.updates.stepping.known_elsewhere import references, refuse_lookups
from hmpx.updates.stepping.optimizer_classes import by_memory, scope_of
from hmpx.updates.stepping.shadow import Shadow, ShownState, Sight
from hmpx.updates.stepping.step_call import (
    ShownParameters,
    StepCall,
    StepContext,
    WriteBack,
    all_lists,
    are_same,
    groups_of,
    hides_writes,
    lists_of,
    nested,
    values_of,
)
from hmpx.updates.stepping.transfers import Launches, Operators, together

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


def chunks(segments: list[Segment], others: list[Parameter] | None, context: StepContext) -> list[Chunk]:
    """Cut what the optimizer's own code steps into chunks.

    A class that hmpx does not know sees all of them at once, and so does any on XLA, where a step is one graph
    and the compiler bounds its memory.

    others: parameters that are not BF16, which the first chunk steps. None: hmpx does not know the class.
    """

    def chunk_of(segments: list[Segment], others: Sequence[Parameter] | None) -> Chunk:
        made = Chunk(context.optimizer, segments, others)
        made.make_shadows(context)
        return made

    if others is None:
        return [chunk_of(segments, others)]
    alone, few = list[list[Segment]](), dict[torch.device, list[Segment]]()
    for segment in segments:
        if scope_of(context.optimizer) == "parameter" and is_sharded(segment.param):  # all ranks gather in this order
            alone.append([segment])
        else:
            few.setdefault(segment.param.device, []).append(segment)
    found = alone
    for device, of in few.items():
        size = sum(segment.share for segment in of) if is_lazy(of[0].param) else context.size(device)
        found = [*found, *together(of, size, attrgetter("share"))]
    if others and not found:
        found = [[]]
    return [chunk_of(each, () if i else others) for i, each in enumerate(found)]


class Chunk:
    """BF16 parameters, and other ones that are stepped as they are. The methods need `torch.no_grad()`.

    Where hmpx does not know the class, optimizers that it holds (Lookahead's base) see the same shadows.

    Args:
        others: parameters that are not BF16. None: hmpx does not know the class, which sees all that it has.

    Attributes:
        device: of its copies; size: how many elements of a room its copies take.
        is_in_room: whether its copies are in the room. If not, it is stepped once.
    """

    def __init__(self, optimizer: Optimizer, segments: list[Segment], others: Sequence[Parameter] | None) -> None:
        self.device = segments[0].param.device if segments else torch.device("cpu")
        self._is_known = others is not None
        gathers = scope_of(optimizer) == "parameter" and any(is_sharded(segment.param) for segment in segments)
        optimizers = self._optimizers(optimizer)
        self._sight = Sight(self._is_known, gathers, by_memory(*optimizers))
        self.segments, self._names = segments, [segment.name for segment in segments]
        self._others, self._are_as_shown = others, True
        self._sharded = [segment for segment in segments if segment.box is not None]
        owners = {id(each.state): each for each in reversed(optimizers)}.values()  # a wrapper may share its base's
        self._states: list[dict[Any, Any]] = [owner.state for owner in owners]
        self._weight_keys = [frozenset() if self._is_known else weight_keys(owner) for owner in owners]
        self.is_in_room, self.size = self._is_known and not gathers, 0
        self._shadows, self._qs = list[Shadow](), list[Parameter]()
        self._groups: list[tuple[Optimizer, list[dict], list[list]]] = []  # of each optimizer: groups, lists in them
        self._versioned: list[tuple[Tensor, str]] = []
        self._versions: list[int] = []

    def make_shadows(self, context: StepContext) -> None:
        """Make a shadow of each parameter, and find out how large a room their copies take."""
        self._shadows = [Shadow(segment, context.stores.of(segment), self._sight) for segment in self.segments]
        dense = [shadow for shadow in self._shadows if shadow.gradient is not None]
        self._grads = [shadow.gradient for shadow in dense if shadow.gradient is not None]
        self._indices = [context.indices[shadow.p] for shadow in dense]
        if self.is_in_room:
            self._find_states()
            for piece in (*self._grads, *self._moved):
                piece.at, self.size = self.size, self.size + piece.end - piece.at

    def _find_states(self) -> None:
        for shadow in self._shadows:
            pairs = zip(self._states, self._weight_keys, strict=True)
            shadow.states = [ShownState(s, shadow.segment, self._sight, s.get(shadow.p), keys) for s, keys in pairs]
            for state in shadow.states:
                state.find_shown()
        self._moved = [piece for shadow in self._shadows for piece in shadow.pieces]

    def _optimizers(self, optimizer: Optimizer) -> list[Optimizer]:
        return [optimizer] if self._is_known else list(nested(optimizer))

    def kernels(self, gradients: Sequence[Tensor]) -> ModuleType | None:
        """Return the kernels that can move every tensor of this chunk; None if there are none."""
        found = {piece.kernels(local(piece.held.tensor)) for piece in self._moved}
        dense = zip(self._grads, self._indices, strict=True)
        found |= {g.kernels(gradients[i]) for g, i in dense if gradients[i].dtype is not torch.float32}
        return found.pop() if len(found) == 1 and self.is_in_room else None

    def place_in(self, room: Tensor | None, table: Table | None, gradients: Sequence[Tensor]) -> None:
        """Make the shadows and their state, with the copies in this room; without one, each in memory of its own.

        Args:
            table: gets the launches of the kernels that move this chunk. None: torch's operators move it.
            gradients: those of all parameters of the step.
        """
        for shadow in self._shadows:
            shadow.place_in(room)
        self._transfer: Launches | Operators
        if table is None:
            self._transfer = Operators(self._grads, self._indices, self._moved)
        else:
            self._transfer = Launches(self._grads, self._indices, gradients, self._moved, table)
        self._stale = self._shadows  # those that must be shown their gradients
        self._versioned = [
            (tensor, shadow.segment.name)
            for shadow in self._shadows
            for state in shadow.states
            for tensor in state.versioned
        ]
        self._given: list[dict[Any, Any]] = []

    def step(self, call: StepCall, write_back: WriteBack, gradients: Sequence[Tensor]) -> Any:
        """Step every parameter of this chunk. If the optimizer raises, weights and gradients are as they were.

        State is, too, unless the optimizer has written to the held tensors themselves: these cannot be restored, and
        `write_back.written` gets the names of their parameters.

        Args:
            gradients: those of all parameters of the step, as this rank holds them.
        """
        optimizer, key, written = call.optimizer, write_back.rounding_key, write_back.written
        lists, self._versions = ShownParameters([], []), []
        try:
            if not self.is_in_room:
                self._find_states()
                self.place_in(None, None, gradients)
            lists = self._show(optimizer, write_back, gradients)
            with lists:
                result = self._run(call, write_back, lists)
            self._hand_back(optimizer)
            written.append(self._names)
            self._write(key)
            self._take(optimizer, key)
            key.flush()
        except BaseException:
            lists.hide()  # an interrupt may have come while they were shown or hidden
            key.pending.clear()
            written.append(self._written(optimizer))
            with torch.no_grad():  # an interrupt in a closure may leave gradients on
                self._undo()
            raise
        return result

    def _show(self, optimizer: Optimizer, write_back: WriteBack, gradients: Sequence[Tensor]) -> ShownParameters:
        """Show weights, gradients and state. Return the block in which `param_groups` hold the shadows."""
        self._transfer.read(gradients)
        for shadow in self._stale:
            shadow.begin()
        self._stale = []
        self._versions = [version_of(tensor) for tensor, _ in self._versioned]
        if not self._given:
            self._shown, self._qs = self._shown_lists(optimizer), [shadow.q for shadow in self._shadows]
            self._remember_given()
        self._left = [shadow.grad for shadow in self._shadows]
        self._seen = _versions(self._left)
        for states, given in zip(self._states, self._given, strict=True):
            for segment in () if self._is_known else self.segments:
                states.pop(segment.param, None)  # one that goes through its state finds the shadow alone
            states.update(given)  # a dict knows the hashes of its keys, which tensors compute in Python
        if not self._is_known:
            self._groups = groups_of(self._optimizers(optimizer))
            self._referred = self._references()
        return ShownParameters(all_lists(self._optimizers(optimizer)), self._shown)

    def _references(self) -> list[tuple[int, int, int]]:
        """Return how many references there are to each shadow, beside those that hmpx and `state` hold."""
        return references([shadow.q for shadow in self._shadows], chain(*self._states))

    def _remember_given(self) -> None:
        """Remember what each optimizer finds for each shadow, and the tensors in it."""
        both = list(zip(self._qs, self._shadows, strict=True))
        self._given = [
            {q: state for q, shadow in both if (state := shadow.states[i].given) is not None}
            for i in range(len(self._states))
        ]
        self._own = [self._given[0].get(q) for q in self._qs] if self._is_known else []
        copied = [(q, shadow.states[0]) for q, shadow in both if shadow.states[0].shown is not None]
        self._copies: list[dict[str, Any]] = [self._given[0][q] for q, _ in copied]
        self._keys, self._values = list(chain(*self._copies)), values_of(self._copies)
        self._is_plain = all([state.shown is None or len(state.same) == len(state.shown) for _, state in copied])

    def _is_as_shown(self, left: list[Any]) -> bool:
        """Return whether the step has left the very tensors that it was shown: most do, and then no state moves."""
        if not self._is_known or not self._is_plain or not all(map(is_, left, self._own)):
            return False
        values = values_of(self._copies)
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return is_same and list(chain(*self._copies)) == self._keys

    def _shown_lists(self, optimizer: Optimizer) -> list[list[Any]]:
        """Return the parameters that each list of `param_groups` shows."""
        new = {shadow.p: shadow.q for shadow in self._shadows}
        others = None if self._others is None else set(self._others)
        lists = all_lists(self._optimizers(optimizer))
        return [[new.get(p, p) for p in params if p in new or others is None or p in others] for params in lists]

    def _run(self, call: StepCall, write_back: WriteBack, lists: ShownParameters) -> Any:
        if self._is_known:
            return call.run()
        on_real = functools.partial(self._on_real_parameters, call.optimizer, write_back, lists)
        try:
            with torch.set_grad_enabled(write_back.is_grad_on):
                result = call.with_functions(on_real).run()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise HmpxError(
                f"{type(call.optimizer).__name__} differentiates gradients inside step(), and the FP32 "
                "copies that hmpx hands it have no graph: keep its weights in FP32, without hmpx.attach, or take "
                "another optimizer"
            ) from error
        self._refuse_other_lists(call.optimizer, lists)
        return result

    def _refuse_other_lists(self, optimizer: Optimizer, lists: ShownParameters) -> None:
        """Refuse a step that has changed groups or their lists, in which the shadows stood."""
        unchanged = [
            are_same(each.param_groups, groups) and are_same(lists_of(groups), of_one)
            for each, groups, of_one in self._groups
        ]
        if not all(unchanged) or not lists.are_as_shown():
            raise HmpxError(
                f"{type(optimizer).__name__} changes param_groups, or a list of parameters in it, inside step(), while "
                "they hold the FP32 copies that hmpx steps: change them between two steps, or keep its weights in FP32"
            )

    def _on_real_parameters(
        self, optimizer: Optimizer, write_back: WriteBack, lists: ShownParameters, closure: Callable
    ) -> Callable:
        """Wrap a closure. It runs the model, so it must see the real parameters, with the weights of the shadows.

        A signal that comes while the closure runs does not wait, unless the step has already written to state.
        """

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                self._show_trial_point()
            lists.hide()
            try:
                with torch.enable_grad():
                    if self._written(optimizer):
                        return closure(*args, **kwargs)
                    return write_back.signals.let_through(closure, args, kwargs)
            finally:
                lists.show()
                with torch.no_grad():
                    self._take_evaluation()

        return evaluate

    def _show_trial_point(self) -> None:
        """Before a closure: give the parameters the weights of the shadows, rounded to nearest, and their gradients."""
        for shadow in self._shadows:
            shadow.show_trial_point()

    def _take_evaluation(self) -> None:
        """After a closure: show the optimizer the new gradients, and accept it if the closure has changed weights."""
        for shadow in self._shadows:
            shadow.take_evaluation()

    def _hand_back(self, optimizer: Any) -> None:
        """Make the changes that the step has made to the shadows' gradients in the parameters' gradients, too."""
        if not self._is_known:
            for shadow in self._shadows:
                if written := shadow.bypassed():
                    raise HmpxError(
                        f"{type(optimizer).__name__} wrote to {written} {shadow.segment.name!r} itself: it "
                        "does not take its parameters from param_groups, so hmpx cannot step it in FP32"
                    )
            refuse_lookups(optimizer, [shadow.q for shadow in self._shadows])
            self._refuse_references(optimizer)
        left: list[Any] = [q.grad for q in self._qs]
        # Versions do not tell of two kinds of writes: of fused kernels to gradients that a GradScaler has scaled, and
        # of foreach kernels while a dispatch mode is on. How an unknown class writes nobody knows.
        is_blind = not self._is_known or getattr(optimizer, "grad_scale", None) is not None or dispatch_modes() > 0
        if is_blind or not all(map(is_, left, self._left)) or _versions(left) != self._seen:
            for shadow, version in zip(self._shadows, self._seen, strict=True) if self._is_known else ():
                shadow.version = version
            self._stale = [shadow for shadow in self._shadows if shadow.hand_back(is_blind=is_blind)]
        self._left = []

    def _refuse_references(self, optimizer: Optimizer) -> None:
        """Refuse a step after which somebody still refers to a shadow, or to its memory."""
        for pause in (0, 0.01, 0.3, None):
            pairs = zip(self._names, self._references(), self._referred, strict=True)
            names = [name for name, now, was in pairs if now[0] > was[0] or (now[1] == was[1] and now[2] > was[2])]
            if not names:
                return
            if pause:  # a thread that looks at stacks holds the frames of functions that have ended, for a moment
                time.sleep(pause)
            elif pause is not None:
                gc.collect()  # what refers to itself, as a caught exception may, is garbage
        raise HmpxError(
            f"{type(optimizer).__name__} keeps the FP32 copy of parameter {names[0]!r}, or a view of it, that this "
            "step was shown, outside of its state: the next step has another copy, and would not find it there. Keep "
            "its weights in FP32, without hmpx.attach, or let it keep by parameter what it keeps in `state`"
        )

    def _write(self, key: RoundingKey) -> None:
        for shadow in () if self._is_known and not self._sight.gathers else self._shadows:
            shadow.collect()
        self._transfer.write(key)
        for segment in self._sharded:
            segment.mark_written()

    def _take(self, optimizer: Optimizer, key: RoundingKey) -> None:
        """Move the state that the step has left for the shadows to the parameters."""
        lefts = list(map(self._states_left, self._states))
        self._are_as_shown = all(map(self._is_as_shown, lefts))
        if not self._are_as_shown:
            self._find_weights(lefts)
        for i, left in enumerate(lefts if not self._are_as_shown else ()):
            for shadow, state in zip(self._shadows, left, strict=True):
                shadow.states[i].take(state, optimizer, key, shadow.q.shape)
        for shadow in () if self._is_known else self._shadows:
            shadow.take_marks()

    def _find_weights(self, lefts: Iterable[list[Any]]) -> None:
        """Find the weights in state that is new, before it is written."""
        new: dict[int, tuple[Any, list[tuple[str, Tensor, Tensor]]]] = {}
        for i, left in enumerate(lefts):
            for shadow, items in zip(self._shadows, left, strict=True):
                state = shadow.states[i]
                is_asked = isinstance(items, dict) and isinstance(state.weight_keys, set) and not state.form.as_left
                known = by_own_keys(state.content) if is_asked else ()
                for key, value in items.items() if is_asked else ():
                    is_new = key not in known and key not in state.weight_keys and is_moment(value)
                    if is_new and value.shape == shadow.q.shape:
                        new.setdefault(id(state.weight_keys), (state.weight_keys, []))[1].append((key, value, shadow.q))
        for keys, found in new.values():
            find_weights(keys, found)

    def _states_left(self, states: dict[Any, Any]) -> list[Any]:
        """Take the state of the shadows out of the optimizer's state, and return it.

        Where they come last there, `popitem` takes it, which hashes no key: tensors compute their hashes in Python.
        """
        if len(states) >= len(self._qs) and all(map(is_, reversed(states), reversed(self._qs))):
            return [states.popitem()[1] for _ in self._qs][::-1]
        return [states.pop(q, None) for q in self._qs]

    def can_be_kept(self, *, is_new: bool = False) -> bool:
        """Return whether it can be stepped again: the last step has left all state in the tensors that it was shown.

        is_new: whether this was the first step. Before later ones, a fingerprint compares the parameters' state.
        """
        is_as_made = not is_new or all([state.is_as_made() for shadow in self._shadows for state in shadow.states])
        return self.is_in_room and self._are_as_shown and is_as_made

    def _undo(self) -> None:
        self._left, self._stale = [], self._shadows
        for each, groups, lists in self._groups:
            each.param_groups[:] = groups
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
        for shadow in self._shadows:
            for states, state in zip(self._states, shadow.states, strict=False):  # none before they were found
                states.pop(getattr(shadow, "q", None), None)
                state.undo()
            shadow.undo()

    def _written(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the parameters whose state the optimizer has written in place."""
        is_blind, pairs = hides_writes(optimizer), zip(self._versioned, self._versions, strict=False)
        return [name for (tensor, name), version in pairs if is_blind or version_of(tensor) != version]


def _versions(grads: list[Any]) -> list[int]:
    return [0 if grad is None else version_of(grad) for grad in grads]
