"""One segment as an optimizer sees it: a shadow, which is FP32 weights with an FP32 gradient, and its FP32 state."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.devices import kernels_for
from hmpx.updates.holding.held import Held, RoundingKey, Segment
from hmpx.updates.holding.state_dtypes import is_bf16, is_moment, keeps_bf16
from hmpx.updates.holding.state_forms import form_of, written
from hmpx.updates.holding.state_tensors import HeldState, entries, held_states
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
        is_last: whether this is the last segment: the parameter keeps its result.
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
        keeps_left: whether the object that the step leaves becomes the parameter's entry, as it is.
    """

    def __init__(self, optimizer: Optimizer, segment: Segment) -> None:
        self.segment, self.form = segment, form_of(segment)
        self._states: dict[Any, Any] = optimizer.state  # kept batches hold this, and may not hold the optimizer
        self.own = self._states.get(segment.param)
        items = self.own.items() if isinstance(self.own, dict) else ()
        self.content = {key: value[:] if type(value) is list else value for key, value in items}
        self.shown: dict[str, Any] | None = None
        self.keeps_left = self.form.as_left

    def move_to(self, shadow: Parameter) -> None:
        """Move the entry to the key of the shadow."""
        if self.own is not None:
            self._states.pop(self.segment.param)
            self._states[shadow] = self.own if self.shown is None else self.shown

    def take(
        self, left: Any, optimizer: Optimizer, key: RoundingKey, already: Mapping[str, Tensor] | None = None
    ) -> None:
        """Make what the step has left of a whole parameter's state the parameter's entry.

        already: the shown tensors that are written back already, by their keys.
        """
        p, already = self.segment.param, already or {}
        if left is None:
            if self.own is not None:
                self._states.pop(p, None)
        elif isinstance(left, dict) and not self.keeps_left:
            before, after = held_states(self.own or {}, p), dict[str, Any]()
            for name, value in left.items():
                if name in already and value is already[name]:
                    after.update(before[name].entries(name))
                else:
                    after.update(written(self.form, self.segment, name, value, before.get(name), key))
            self.keep(after)
        else:
            if self.own is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
                keeps_bf16(optimizer)
            self._states[p] = left

    def take_from(self, shadow: Parameter, optimizer: Optimizer, key: RoundingKey) -> None:
        """Make the entry that the step has left under the key of the shadow the parameter's."""
        self.take(self._states.pop(shadow, None), optimizer, key)

    def keep(self, after: Mapping[str, Any]) -> None:
        """Make these items the parameter's entry, in the dict that it has."""
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


class _Gradient(Held):
    """The gradient of a parameter; nothing holds it between two steps. `tensor` is the parameter."""

    kind = native.BF16


class Shown:
    """One segment; under `torch.no_grad()`.

    Attributes:
        index: of the gradient in the list of all gradients.
        group: the index of the parameter's group.
        end: where its copies end in the room; `begin` is where they begin.
        weight: the weights; their FP32 form is the `shadow`.
        grad: a copy of the gradient; None where the parameter's own is shown.
        counts: counts of steps, where the parameter is cut.
    """

    def __init__(self, segment: Segment, context: StepContext, begin: int) -> None:
        p, state = segment.param, ShownState(context.optimizer, segment)
        form, own = state.form, state.own
        self.segment, self.index, self.group = segment, context.indices[p], context.group[p]
        self.end = begin
        self.counts: list[CountClone] = []
        self._state, self._late, self._form = state, context.late, form
        self._by_memory = by_memory(context.optimizer)
        store, grad = context.stores.of(segment), context.gradients[self.index]
        # Only torch's steps may work on the masters themselves. Other classes may write to ``p.data``, as Lion does.
        # Such a write does not count in `_version`: after an error, nobody would know that masters must be restored.
        of_torch = type(context.optimizer).__module__.startswith("torch.optim.")
        on_masters = store.shows_masters and of_torch and form.as_left and bool(own)
        self.weight = self._piece(store, segment.name, itself=on_masters)
        self.grad = None if self._is_ready(grad) else self._piece(_Gradient(p), "", itself=False)
        self._of_gradient = kernels_for(local(p) if self.grad is None else grad)
        if self.grad is not None and not is_bf16(grad):
            self._of_gradient = None  # it is something else than a copy
        self._pieces: dict[str, Piece] = {}
        self._is_cast = False  # whether some shown tensor is neither a piece nor the parameter's own
        if isinstance(own, dict) and not (segment.start is None and form.as_left and self._lies_as_weights(own)):
            self._show_copies(own)

    def _show_copies(self, own: dict[str, Any]) -> None:
        self._state.shown, self._state.keeps_left = (shown := dict[str, Any]()), False
        for key, value in held_states(own, self.segment.param).items():
            if isinstance(value, HeldState) and (value.tensor.dim() or not is_bf16(value.tensor)):
                shown[key] = None
                self._pieces[key] = self._piece(value, f"{self.segment.name}.{key}")
                continue
            value = value.tensor if isinstance(value, HeldState) else value
            if not self._form.as_left and is_bf16(value):
                value, self._is_cast = value.float(), True
            elif self.segment.start is not None and isinstance(value, Tensor):
                self.counts.append(CountClone(value.clone(), value, self.segment.is_last))
                value = self.counts[-1].clone
            shown[key] = value

    def _piece(self, held: Held, name: str, *, itself: bool = True) -> Piece:
        if itself and held.itself(self.segment) is not None and self._fits(held.tensor):
            return Piece(held, self.segment, name, None)
        piece = Piece(held, self.segment, name, self.end)
        self.end += piece.takes
        return piece

    def _fits(self, value: Tensor) -> bool:
        """Whether a tensor lies as a copy of the weights does, where the optimizer goes by memory."""
        segment, p = self.segment, self.segment.param
        if (segment.start is not None and not segment.by_rows) or not self._by_memory or value is p:
            return True
        one, other = segment.of(value), segment.of(p)
        if one.is_contiguous() and other.is_contiguous():
            return True
        return one.stride() == torch.empty_like(other, device="meta").stride()

    def _lies_as_weights(self, own: dict[str, Any]) -> bool:
        if not self._by_memory:
            return True
        shape = self.segment.param.shape
        return all([not is_moment(value) or value.shape != shape or self._fits(value) for value in own.values()])

    def _is_ready(self, grad: Tensor) -> bool:
        """Whether the optimizer can be shown the parameter's own gradient: it is FP32, and lies as the shadow does."""
        if grad.layout is not torch.strided:
            return True  # in FP32
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
        """Whether the optimizer is shown copies of the parameter's state, and not that itself."""
        return self._state.shown is not None

    @property
    def can_be_as_shown(self) -> bool:
        """Whether there is nothing to take where a step leaves the state that it was shown."""
        return not self._is_cast and not (self._state.own and not self.shows_copies and self.segment.start is not None)

    @property
    def state(self) -> Any:
        """The state that the optimizer finds for the shadow, a copy that it may change; None for none."""
        return self._state.own if self._state.shown is None else self._state.shown.copy()

    @property
    def versioned(self) -> list[Tensor]:
        """Tensors whose versions show whether a step that raised has written to held memory."""
        state = self._state.content if self._state.shown is None else self._state.shown
        copies = {key for key, piece in self._pieces.items() if piece.at is not None}
        found = [value for key, value in state.items() if isinstance(value, Tensor) and key not in copies]
        return [*found, self.shadow] if self.weight.at is None else found

    def kernels(self) -> ModuleType | None:
        """Return the kernels that can move all of it: those for its gradient, if they know how the rest is held."""
        found = self._of_gradient
        return found if all([kernels_that_move(piece) is found for piece in self.pieces if piece.is_moved]) else None

    def place_in(self, room: Tensor) -> None:
        """Make the shadow and its state, with copies in this room."""
        p = self.segment.param
        self.weight.show(room, p)
        if self.grad is not None:
            self.grad.show(room, p if self._by_memory else self.segment.grad)
        for key, piece in self._pieces.items():
            piece.show(room, p if self._by_memory else piece.held.laid)
            assert self._state.shown is not None, "pieces are shown in it"
            self._state.shown[key] = piece.x
        self.rest()

    def take(self, left: Any, optimizer: Optimizer, rounding_key: RoundingKey) -> bool:
        """Take the state that the optimizer left over into the parameter's state.

        The pieces that it was shown are written already.

        Returns:
            Whether there was anything else.
        """
        shown, is_part = self._state.shown, self.segment.start is not None
        if shown is not None:
            is_same = isinstance(left, dict) and not self._is_cast and _is_same(left, shown)
        else:
            is_same = not left if is_part else left is self._state.own
        if is_same and self.segment.param not in self._late:
            return False
        if is_part:
            self._take_part(left or {}, rounding_key)
        else:
            self._state.take(left, optimizer, rounding_key, {key: piece.x for key, piece in self._pieces.items()})
        return True

    def _take_part(self, left: dict[str, Any], rounding_key: RoundingKey) -> None:
        """Take over the state of one segment. State without the parameter's shape is that of the last segment."""
        segment, p, shown = self.segment, self.segment.param, self._state.shown or {}
        after = self._late.setdefault(p, held_states(self._state.own or {}, p))
        clones = {id(count.clone) for count in self.counts}
        for key, value in left.items():
            if value is shown.get(key) and (key in self._pieces or id(value) in clones):
                continue
            if not isinstance(value, Tensor) or value.shape != self.shadow.shape:
                after[key] = value
                continue
            after[key] = holder = self._form.holder(p, value, after.get(key))
            holder.write(segment, value, f"{segment.name}.{key}", rounding_key)
        if segment.is_last:
            self._state.keep(entries(self._late.pop(p)))

    def undo(self) -> None:
        """Restore the state after the step raised."""
        self._state.undo(self.shadow)
        self.rest()

    def rest(self) -> None:
        """Bring the shadow to rest, as between two steps: its gradient is the copy or None, not the parameter's own."""
        self.shadow.grad = None if self.grad is None else self.grad.x

    def is_as_made(self) -> bool:
        """Whether the state is in the tensors that were shown, under the same keys."""
        state = self._state
        return not self._is_cast and (not isinstance(state.own, dict) or _is_same(state.own, state.content))


def _is_same(left: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the optimizer left the same tensor objects that it was shown."""
    return len(left) == len(state) and all(left.get(key) is value for key, value in state.items())
