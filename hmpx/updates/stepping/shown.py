"""One segment as an optimizer sees it: a shadow, which is FP32 weights with an FP32 gradient, and its FP32 state."""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.devices import kernels_for
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.holding.state_dtypes import is_bf16, is_moment, keeps_bf16
from hmpx.updates.holding.state_forms import AS_LEFT, form_of, written
from hmpx.updates.holding.state_tensors import HeldState, HeldTensor, entries, held_states
from hmpx.updates.holding.stores import Stores
from hmpx.updates.ranks.sharding import local
from hmpx.updates.stepping.optimizer_classes import by_memory
from hmpx.updates.stepping.transfers import Piece, kernels_that_move

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class StepContext(NamedTuple):
    """Facts that all segments of a step share.

    Attributes:
        indices: of each stepped parameter, the index of its gradient in `gradients`.
        gradients: as this rank holds them.
        group: of each parameter, the index of its group.
        late: new state of parameters that are cut and whose last segment is still to come.
    """

    optimizer: Optimizer
    stores: Stores
    indices: dict[Parameter, int]
    gradients: list[Tensor]
    group: dict[Parameter, int]
    late: dict[Parameter, dict[str, Any]]


class CountClone(NamedTuple):
    """A count of steps, or another state tensor without the parameter's shape, of a parameter that is cut in parts.

    Attributes:
        clone: the tensor that one segment sees.
        own: the parameter's tensor.
        is_last: whether the segment is the parameter's last one, whose result the parameter keeps.
    """

    clone: Tensor
    own: Tensor
    is_last: bool


class ShownState:
    """The state of one parameter, for one step or for all steps in the same batches.

    Attributes:
        own: the parameter's entry in the optimizer's state; None if it has none.
        content: the items of `own`, if that is a dict.
        shown: copies that the optimizer sees in the place of `own`; None where it sees `own` itself.
        moved: the tensors of `shown` that `take` need not write back: the batch or the plan does.
        keeps_left: whether the very object that the step leaves becomes the parameter's state.
        weights: the keys of state that are weights, and are held as the step leaves them.
    """

    def __init__(self, states: dict[Any, Any], segment: Segment, own: Any, weights: Set[str] = frozenset()) -> None:
        self.segment, self.form, self.weights = segment, form_of(segment), weights
        self._states, self.own = states, own  # kept batches hold the optimizer's state, and may not hold the optimizer
        items = self.own.items() if isinstance(self.own, dict) else ()
        self.content = {key: value[:] if type(value) is list else value for key, value in items}
        self.shown: dict[str, Any] | None = None
        self.moved: dict[str, Tensor] = {}
        self.keeps_left = self.form.as_left

    def move_to(self, shadow: Parameter) -> None:
        """Move the entry to the key of the shadow."""
        if self.own is not None:
            self._states.pop(self.segment.param)
            self._states[shadow] = self.own if self.shown is None else self.shown

    def take(
        self, left: Any, optimizer: Optimizer, key: RoundingKey, late: dict[Parameter, dict[str, Any]] | None = None
    ) -> None:
        """Store the state that a step has left for the segment as the state of its parameter.

        late: see `StepContext`; None for a whole parameter.
        """
        p = self.segment.param
        if late is not None:
            after = late.setdefault(p, held_states(self.own or {}, p))
            after.update(self._written(left or {}, after, key))
            if self.segment.is_last:
                self._keep(entries(late.pop(p)))
        elif left is None:
            if self.own is not None:
                self._states.pop(p, None)
        elif isinstance(left, dict) and not self.keeps_left:
            self._keep(entries(self._written(left, held_states(self.own or {}, p), key)))
        else:
            if self.own is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
                keeps_bf16(optimizer)
            self._states[p] = left

    def _written(self, left: Mapping[str, Any], before: Mapping[str, Any], key: RoundingKey) -> dict[str, Any]:
        """Write the state that a step has left; return it in its held form, by the optimizer's own keys."""
        return {
            name: before[name]
            if name in self.moved and value is self.moved[name]
            else written(
                AS_LEFT if name in self.weights else self.form, self.segment, name, value, before.get(name), key
            )
            for name, value in left.items()
        }

    def left_for(self, shadow: Parameter) -> dict[str, Any] | None:
        """Return the state that a step has left under the shadow, if that is a dict."""
        left = self._states.get(shadow)
        return left if isinstance(left, dict) else None

    def take_from(self, shadow: Parameter, optimizer: Optimizer, key: RoundingKey) -> None:
        """Store the state that a step has left under the shadow as the state of the parameter."""
        self.take(self._states.pop(shadow, None), optimizer, key)

    def _keep(self, after: Mapping[str, Any]) -> None:
        """Store these items in the dict that the parameter has, or in a new one."""
        if after or self.own is not None:
            state = self._states.setdefault(self.segment.param, {} if self.own is None else self.own)
            state.clear()
            state.update(after)

    def undo(self, shadow: Tensor) -> None:
        """Give the parameter its entry again, with the items that it had, after the step raised."""
        self._states.pop(shadow, None)
        if self.own is not None:
            if isinstance(self.own, dict):
                self.own.clear()
                self.own.update(self.content)
            self._states[self.segment.param] = self.own


class Gradient(Held):
    """The gradient of a parameter, which is not held between steps: the parameter stands in for `tensor`."""

    kind = native.BF16


class Shown:
    """One segment as the optimizer sees it. It is made and used under `torch.no_grad()`.

    The optimizer sees pieces: weights, gradient, and each state tensor of the parameter's shape. A piece is an FP32
    copy in the room, a buffer for such copies. It is the held tensor itself if that is FP32, lies in memory as the
    optimizer wants it, and can be restored after an error.

    Attributes:
        index: of the gradient in the list of all gradients.
        group: the index of the parameter's group.
        end: where its copies end in the room; `begin` is where they begin.
        weight: the weights; their FP32 form is the `shadow`.
        grad: a copy of the gradient; None where the parameter's own is shown.
        counts: clones of the counts of steps, if the parameter is cut.
    """

    def __init__(self, segment: Segment, context: StepContext, begin: int) -> None:
        p, optimizer = segment.param, context.optimizer
        self.segment, self.index, self.group, self.end = segment, context.indices[p], context.group[p], begin
        self.counts: list[CountClone] = []
        self._by_memory, self._is_part = by_memory(optimizer), segment.start is not None
        self._state = state = ShownState(optimizer.state, segment, optimizer.state.get(p))
        self._late = context.late if self._is_part else None
        store, gradient = context.stores.of(segment), context.gradients[self.index]
        # Only torch's steps may work on the masters themselves. Other classes may write to ``p.data``, as Lion does.
        # Such a write does not count in `_version`: after an error, nobody would know that masters must be restored.
        of_torch = type(optimizer).__module__.startswith("torch.optim.")
        on_masters = store.shows_masters and of_torch and state.form.as_left and bool(state.own)
        self.weight = self._piece(store, segment.name, itself=on_masters)
        self.grad = None if self._is_ready(gradient) else self._piece(Gradient(p), "", itself=False)
        self._gradient_kernels = self._kernels_of(gradient)
        self._pieces: dict[str, Piece] = {}
        self._is_cast = False  # whether some shown tensor is neither a piece nor the parameter's own
        sees_own = not self._is_part and state.form.as_left and self._lies_as_weights(state.content)
        if isinstance(state.own, dict) and not sees_own:
            self._show_copies(state.own)

    def _kernels_of(self, gradient: Tensor) -> ModuleType | None:
        """Return the kernels that can copy the gradient; where no copy is shown, the kernels for the weights."""
        if self.grad is None:
            return kernels_for(local(self.segment.param))
        return kernels_for(gradient) if is_bf16(gradient) else None

    def _show_copies(self, own: dict[str, Any]) -> None:
        """Show the state in a new dict: tensors of the parameter's shape as pieces, counts of parts as clones."""
        state, name = self._state, self.segment.name
        state.shown, state.keeps_left = (shown := dict[str, Any]()), False
        for key, held in held_states(own, self.segment.param).items():
            value = held.tensor if isinstance(held, HeldState) else held
            shown[key] = value
            if isinstance(held, HeldState) and (value.dim() or not is_bf16(value)):
                self._pieces[key] = self._piece(held, f"{name}.{key}")  # `place_in` shows it
            elif not state.form.as_left and is_bf16(value):
                shown[key], self._is_cast = value.float(), True
            elif self._is_part and isinstance(value, Tensor):
                self.counts.append(CountClone(value.clone(), value, self.segment.is_last))
                shown[key] = state.moved[key] = self.counts[-1].clone

    def _piece(self, held: Held, name: str, *, itself: bool = True) -> Piece:
        """Make a piece, of the held tensor itself if that can be shown and `itself` allows it, else of a copy."""
        if itself and held.itself(self.segment) is not None and self._fits(held.tensor):
            return Piece(held, self.segment, name, None)
        piece = Piece(held, self.segment, name, self.end)
        self.end += piece.takes
        return piece

    def _fits(self, tensor: Tensor) -> bool:
        """Whether a held tensor can be shown beside a copy of the weights, to an optimizer that reads by memory.

        Such an optimizer takes elements in the order in which they lie in memory. A flat part has only one order.
        """
        segment, p = self.segment, self.segment.param
        if not self._by_memory or tensor is p or (self._is_part and not segment.by_rows):
            return True
        held, weights = segment.of(tensor), segment.of(p)
        if held.is_contiguous() and weights.is_contiguous():
            return True
        return held.stride() == torch.empty_like(weights, device="meta").stride()

    def _lies_as_weights(self, own: dict[str, Any]) -> bool:
        moments = [value for value in own.values() if is_moment(value) and value.shape == self.segment.param.shape]
        return all(map(self._fits, moments))

    def _is_ready(self, grad: Tensor) -> bool:
        """Whether the optimizer can be shown the parameter's own gradient: it is FP32, and lies as the shadow does."""
        if grad.layout is not torch.strided:
            return True  # a sparse one, which the batch casts to FP32
        return (
            grad.dtype is torch.float32
            and not self.segment.by_rows
            and self._by_memory  # torch's own classes, which read gradients and do not write to them
            and grad.is_contiguous()
            and local(self.segment.param).is_contiguous()
        )

    @property
    def pieces(self) -> list[Piece]:
        """Weights and state."""
        return [self.weight, *self._pieces.values()]

    @property
    def shadow(self) -> Tensor:
        """The tensor that the optimizer takes for a parameter."""
        return self.weight.x

    @property
    def shows_copies(self) -> bool:
        """Whether the optimizer sees copies of the state, in another dict than the parameter's own."""
        return self._state.shown is not None

    @property
    def can_be_as_shown(self) -> bool:
        """Whether `take` has nothing to do after a step that has left every state tensor in its place."""
        return not self._is_cast and not (self._state.own and not self.shows_copies and self._is_part)

    @property
    def state(self) -> Any:
        """The state that the optimizer finds for the shadow, or None: `own`, or a copy, so that `shown` stays."""
        return self._state.own if self._state.shown is None else self._state.shown.copy()

    @property
    def versioned(self) -> list[Tensor]:
        """Tensors whose versions show whether a step that raised has written to held memory."""
        state = self._state.content if self._state.shown is None else self._state.shown
        copies = {key for key, piece in self._pieces.items() if piece.at is not None}
        found = [value for key, value in state.items() if isinstance(value, Tensor) and key not in copies]
        return [*found, self.shadow] if self.weight.at is None else found

    def kernels(self) -> ModuleType | None:
        """Return the kernels that can move the gradient and all pieces; None if there are none."""
        found = self._gradient_kernels
        return found if all([kernels_that_move(piece) is found for piece in self.pieces if piece.is_moved]) else None

    def place_in(self, room: Tensor) -> None:
        """Make the shadow and its state, with copies in this room."""
        p = self.segment.param
        self.weight.show(room, p)
        if self.grad is not None:
            self.grad.show(room, p if self._by_memory else self.segment.grad)
        for key, piece in self._pieces.items():
            by_itself = isinstance(piece.held, HeldTensor) and not self._by_memory
            piece.show(room, piece.held.tensor if by_itself else p)
            assert self._state.shown is not None, "pieces are shown in it"
            self._state.shown[key] = self._state.moved[key] = piece.x
        self.rest()

    def take(self, left: Any, optimizer: Optimizer, rounding_key: RoundingKey) -> bool:
        """Store the state that a step has left. The pieces are written already; `CountClone`s are copied by the plan.

        Of a cut parameter, the last segment brings the state that has another shape than the segment.

        Returns:
            Whether there was anything to store.
        """
        state = self._state
        if state.shown is not None:
            is_same = isinstance(left, dict) and not self._is_cast and _is_same(left, state.shown)
        else:
            is_same = not left if self._is_part else left is state.own
        if is_same and not (self._late and self.segment.param in self._late):
            return False
        state.take(left, optimizer, rounding_key, self._late)
        return True

    def undo(self) -> None:
        """Restore the state after the step raised."""
        self._state.undo(self.shadow)
        self.rest()

    def rest(self) -> None:
        """Drop the parameter's own gradient from the shadow between two steps; a copy in the room may stay."""
        self.shadow.grad = None if self.grad is None else self.grad.x

    def is_as_made(self) -> bool:
        """Whether the state is in the tensors that were shown, under the same keys."""
        state = self._state
        return not self._is_cast and (not isinstance(state.own, dict) or _is_same(state.own, state.content))


def _is_same(left: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the optimizer left the same tensor objects that it was shown."""
    return len(left) == len(state) and all(left.get(key) is value for key, value in state.items())
