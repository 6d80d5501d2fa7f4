"""One parameter as an optimizer sees it: a shadow, which is FP32 weights with an FP32 gradient, and its FP32 state.

A shadow is a real Parameter in `param_groups`, and state is under its key, so any optimizer computes in FP32 without
knowing it. The model's own parameters are never swapped: a new `p.data` would reset AccumulateGrad, and DDP would then
stop synchronising without an error.

A step may set a gradient to None, replace it, or write to it. Then hmpx does the same to the gradient of the real
parameter, in its own dtype. It leaves a gradient alone that the step has left alone. What a step binds to a shadow as
an attribute is bound to the parameter. A shadow means nothing after its step, so a step that keeps one is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from operator import is_
from typing import Any, NamedTuple

import torch

from hmpx.base.tensors import shows_values
from hmpx.base.torch_private import version_of
from hmpx.rounding import native
from hmpx.rounding.state_codes import is_coded
from hmpx.updates.holding.held import (
    Held,
    HeldState,
    HeldTensor,
    RoundingKey,
    Segment,
    entries,
    held_states,
    laid_as,
)
from hmpx.updates.holding.sharding import full, held_part, is_sharded, like, local, part_of
from hmpx.updates.holding.state_dtypes import as_fp32, is_bf16, is_moment, keeps_bf16
from hmpx.updates.holding.state_forms import AS_LEFT, InBF16, form_of, written
from hmpx.updates.holding.stores import Store
from hmpx.updates.stepping.step_count import NEXT_KEY
from hmpx.updates.stepping.transfers import Piece

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class Sight(NamedTuple):
    """How the optimizers of a chunk see its parameters.

    Attributes:
        is_known: whether hmpx knows the class: it steps each element, or each parameter, by itself.
        gathers: whether it sees the whole of a sharded parameter. If not, a known class sees this rank's part
            as a plain tensor, and any other class sees a DTensor.
        one_layout: whether gradient and state must lie in memory as the weights do.
    """

    is_known: bool
    gathers: bool
    one_layout: bool

    def of(self, p: Tensor, part: Tensor) -> Tensor:
        """Return what the optimizer sees of a tensor that is sharded as `p` is; `part` is this rank's part of it."""
        if self.gathers:
            return full(like(p, part)) if is_sharded(p) else part
        return part if self.is_known else like(p, part)

    def fits(self, tensor: Tensor, p: Tensor) -> bool:
        """Return whether a held state tensor can be shown beside a copy of the weights `p`."""
        if not self.one_layout or not is_moment(tensor):
            return True
        held, weights = local(tensor), local(p)
        if held.is_contiguous() and weights.is_contiguous():
            return True
        return held.stride() == torch.empty_like(weights, device="meta").stride()


class ShownState:
    """The state of one parameter in one optimizer, as its steps see it.

    Attributes:
        own: the parameter's entry in the optimizer's state; None if it has none.
        content: the items of `own`, if that is a dict.
        shown: what the optimizer sees in the place of `own`; None where it sees `own` itself.
        pieces: by key, the tensors of `shown` that the chunk reads and writes.
        same: the tensors of `shown` that need not be stored if the step leaves them in their places.
        weight_keys: of state that is weights, and are held as the step leaves them.
    """

    def __init__(
        self, states: dict[Any, Any], segment: Segment, sight: Sight, own: Any, weight_keys: Set[str] = frozenset()
    ) -> None:
        self._states, self.own, self._sight, self.weight_keys = states, own, sight, weight_keys
        self.segment, self.form = segment, form_of(segment)
        items = own.items() if isinstance(own, dict) else ()
        self.content = {key: value[:] if type(value) is list else value for key, value in items}
        self.pieces: dict[str, Piece] = {}
        self.same: dict[str, Any] = {}
        self.shown: dict[str, Any] | None = None

    def find_shown(self) -> None:
        """Find what the optimizer is to see in the place of `own`."""
        own, sight, p = self.own, self._sight, self.segment.param
        if not isinstance(own, dict):
            return
        held = held_states(own, p) if sight.is_known or sight.gathers or is_coded(own) else own
        shown = {key: self._seen(key, value) for key, value in held.items()}
        is_own = shown.keys() == own.keys() and all(map(is_, shown.values(), own.values()))
        self.shown = None if is_own and self.form.as_left and not self.pieces else shown

    @property
    def _keeps_left(self) -> bool:
        """Whether the very object that the step leaves becomes the parameter's state."""
        sight = self._sight
        is_part = sight.gathers or (sight.is_known and is_sharded(self.segment.param))
        return self.form.as_left and self.shown is None and not is_part

    def _seen(self, key: str, value: Any) -> Any:
        """Return what the step sees of a state value. Of a piece, this is its held tensor until `place_in`."""
        sight, p, as_left = self._sight, self.segment.param, self.form.as_left
        if sight.gathers or not sight.is_known:
            value = value.whole() if isinstance(value, HeldState) else value
            if sight.gathers and isinstance(value, Tensor):
                value = value.full_tensor() if is_sharded(value) else value.clone()
            value = value if as_left and not sight.gathers else as_fp32(value)
            is_laid = not is_moment(value) or value.shape != p.shape or sight.fits(value, p)
            return value if is_laid else laid_as(value, p, value.dtype)
        if not isinstance(value, HeldState):
            if isinstance(self.form, InBF16) and is_moment(value) and is_bf16(value) and not is_sharded(value):
                name = f"{self.segment.name}.{key}"  # of another shape: factored moments
                self.pieces[key] = Piece(HeldTensor(value), Segment(value, name), name)
                return value
            seen = value if as_left else as_fp32(value)
            if seen is value:
                self.same[key] = value
            return seen
        tensor = value.tensor
        is_cast = is_bf16(tensor) and not as_left
        if is_cast and not tensor.dim():
            return tensor.float()
        if isinstance(value, HeldTensor) and not is_cast and sight.fits(tensor, p):
            self.same[key] = local(tensor)
            return self.same[key]
        self.pieces[key] = Piece(value, self.segment, f"{self.segment.name}.{key}")
        return tensor

    def place_in(self, room: Tensor | None) -> None:
        for key, piece in self.pieces.items():
            by_itself = isinstance(piece.held, HeldTensor) and not self._sight.one_layout
            piece.place_in(room, local(piece.held.tensor if by_itself else piece.segment.param))
            assert self.shown is not None, "pieces are shown in it"
            self.shown[key] = self.same[key] = piece.x

    @property
    def given(self) -> Any:
        """The state that the optimizer finds for the shadow, or None: `own`, or a copy, so that `shown` stays."""
        return self.own if self.shown is None else self.shown.copy()

    @property
    def versioned(self) -> list[Tensor]:
        """Held tensors that the optimizer sees: versions show whether a step that raised has written to them."""
        shown = self.content if self.shown is None else self.shown
        seen = [v for k, v in self.content.items() if k in shown and k not in self.pieces and not self._sight.gathers]
        values = [item for value in seen for item in (value if isinstance(value, list) else (value,))]
        return [local(value) for value in values if isinstance(value, Tensor)]

    def is_as_made(self) -> bool:
        """Return whether `own` has the tensors that it had when this was made."""
        if self.shown is not None or self.own is None:
            return True
        return len(self.own) == len(self.content) and all([self.own.get(k) is v for k, v in self.content.items()])

    def take(self, left: Any, optimizer: Optimizer, key: RoundingKey, shape: torch.Size) -> None:
        """Store the state that a step has left for a shadow of this shape as the state of the parameter."""
        p = self.segment.param
        if left is None:
            self._states.pop(p, None)
        elif isinstance(left, dict) and not self._keeps_left:
            before = held_states(self.own or {}, p)
            after = entries({name: self._held(name, value, before, key, shape) for name, value in left.items()})
            if after or self.own is not None:
                state = self._states.setdefault(p, {} if self.own is None else self.own)
                state.clear()
                state.update(after)
        else:
            if self.own is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
                keeps_bf16(optimizer)
            self._states[p] = left

    def _held(self, name: str, value: Any, before: Mapping[str, Any], key: RoundingKey, shape: torch.Size) -> Any:
        if isinstance(value, Tensor) and value is self.same.get(name):
            return before[name]
        form = AS_LEFT if name in self.weight_keys else self.form
        return written(form, self.segment, name, value, before.get(name), key, shape)

    def undo(self) -> None:
        """Give the parameter its entry again, with the items that it had, after the step raised."""
        if self.own is not None:
            if isinstance(self.own, dict):
                self.own.clear()
                self.own.update(self.content)
            self._states[self.segment.param] = self.own


class Gradient(Held):
    """The gradient of a parameter, which is not held between steps: the parameter stands in for `tensor`."""

    kind = native.BF16


class Shadow:
    """The FP32 shadow of one parameter, with its gradient. The methods need `torch.no_grad()`.

    Args:
        q: the shadow, if it stands already. An optimizer finds the attributes of the parameter on it, such as a
            weight-decay flag.

    Attributes:
        weight, gradient: copies of this rank's part of both; `gradient` is None if there is none, or a sparse one.
        states: what each optimizer of the chunk sees of its state.
        grad, version: the gradient that the optimizer is shown, and its version then.
    """

    q: Parameter

    def __init__(self, segment: Segment, store: Store, sight: Sight, q: Parameter | None = None) -> None:
        self.segment, self.p, self._sight = segment, segment.param, sight
        store.begin()
        self.weight = Piece(store, segment, segment.name)
        is_dense = self.p.grad is not None and self.p.grad.layout is torch.strided
        self.gradient = Piece(Gradient(self.p), segment, "") if is_dense else None
        self.states = list[ShownState]()
        self._marks: dict[str, Any] = {}
        if q is not None:
            self._is_shown_as(q)
        self._weight_before: Tensor | None = None  # the weights that `undo` restores, once they are overwritten
        self._gradient_before: tuple[Tensor | None, Tensor | None] | None = None  # for `undo`: object, and values

    @property
    def pieces(self) -> list[Piece]:
        """What the chunk reads and writes: weights and state."""
        return [self.weight, *(piece for state in self.states for piece in state.pieces.values())]

    def place_in(self, room: Tensor | None) -> None:
        """Make the copies, in this room; without one, each in memory of its own."""
        p, one_layout = self.p, self._sight.one_layout
        self.weight.place_in(room, local(p))
        if self.gradient is not None:
            self.gradient.place_in(room, local(p) if one_layout or is_sharded(p) or p.grad is None else p.grad)
        for state in self.states:
            state.place_in(room)
        if not self._sight.gathers:
            self._make()

    def begin(self) -> None:
        """After the copies are read, give the shadow its gradient, and look at the real weights."""
        self._gradient_before = None
        if self._sight.gathers:
            self._make()
        self.show_gradient()
        if not self._sight.is_known:
            self.show_marks()
            self._remember_weights()

    def resume(self, weights: tuple[int, Tensor], shown: tuple[Any, int], gradient: tuple[Any, int]) -> None:
        """Do what `begin` does, with what it would have found: the real weights, the shown gradient, the real one."""
        self._real_weights, (self.grad, self.version), self._real_gradient = weights, shown, gradient
        self._weight_before = self._gradient_before = None

    def forget(self) -> None:
        """Between two steps of a shadow that stands, hold nothing of the step."""
        self.states = []
        del self._real_weights, self.grad, self._real_gradient
        self._weight_before = self._gradient_before = None

    def _make(self) -> None:
        needs_grad = self.p.requires_grad and not self._sight.is_known  # a differentiable step may not write to leaves
        self._is_shown_as(Parameter(self._sight.of(self.p, self.weight.x), requires_grad=needs_grad))

    def _is_shown_as(self, q: Parameter) -> None:
        self.q, self._own_attributes = q, {*vars(q), NEXT_KEY}  # if `q` is a DTensor, it keeps the attributes of one

    def show_marks(self) -> None:
        """Bind to the shadow what is bound to the parameter, and nothing else."""
        self._marks = {key: value for key, value in vars(self.p).items() if key not in self._own_attributes}
        for key in vars(self.q).keys() - self._own_attributes - self._marks.keys():
            delattr(self.q, key)
        vars(self.q).update(self._marks)

    def take_marks(self) -> None:
        """Bind to the parameter what the step has bound to the shadow."""
        left = {key: value for key, value in vars(self.q).items() if key not in self._own_attributes}
        if left.keys() == self._marks.keys() and all(map(is_, left.values(), self._marks.values())):
            return
        for key in self._marks.keys() - left.keys():
            delattr(self.p, key)
        vars(self.p).update(left)

    def show_gradient(self) -> None:
        """Give the shadow its gradient, which has been read."""
        p, grad = self.p, self.p.grad
        if self.gradient is not None:
            self.q.grad = self._sight.of(p, self.gradient.x)
        else:
            self.q.grad = None if grad is None else local(grad.detach()).to(torch.float32, copy=True)
        self.grad, self.version = self.q.grad, 0 if self.q.grad is None else version_of(self.q.grad)
        if not self._sight.is_known:  # a chunk that is kept holds no gradient
            self._real_gradient = grad, _version(grad)

    def hand_back(self, *, is_blind: bool) -> bool:
        """Change the parameter's gradient as the step has changed the shadow's; return whether it has.

        is_blind: whether the step may have written to the gradient without raising its version.
        """
        p, left, grad = self.p, self.q.grad, self.p.grad
        is_shown = left is self.grad
        if is_shown and (left is None or (version_of(left) == self.version and not (is_blind and self._is_written()))):
            return False
        self.keep_gradient()
        if left is None:
            p.grad = None
            return True
        if is_sharded(p) and not is_sharded(left):
            left = like(p, part_of(p, left))
        if grad is None or not is_shown or left.layout is not torch.strided:
            dtype = grad.dtype if grad is not None else getattr(p, "grad_dtype", None) or p.dtype
            p.grad = left.detach().to(dtype, copy=True)
            return True
        if not _can_be_written(grad):
            p.grad = grad = grad.clone(memory_format=torch.contiguous_format)
        grad.copy_(left)
        return True

    def _is_written(self) -> bool:
        """Return whether the shadow's gradient has other values: `.data` and fused kernels write without versions."""
        real, left = self.p.grad, self.q.grad
        assert left is not None, "the caller has looked"
        if real is None:
            return True
        if self._sight.gathers or not shows_values(left) or left.layout is not torch.strided:
            return False
        now, shown = local(left), held_part(self.p, real).float()  # bits of this cast are fixed, NaN's in BF16 are not
        return now.dtype is not torch.float32 or not torch.equal(now.view(torch.int32), shown.view(torch.int32))

    def keep_gradient(self) -> None:
        """Keep a copy of the parameter's gradient for `undo`."""
        if self._gradient_before is None:
            grad = self.p.grad
            self._gradient_before = grad, None if grad is None else grad.detach().clone()

    def collect(self) -> None:
        """Take this rank's part of the result, for the chunk to write."""
        self.weight.x = held_part(self.p, self.q.detach())

    def _remember_weights(self) -> None:
        """Remember the real weights: while the step runs, only a closure may change them."""
        self._real_weights = version_of(self.p), self.p.detach().clone()

    def _have_weights_changed(self) -> bool:
        version, seen = self._real_weights
        if version_of(self.p) != version or not shows_values(self.p):
            return version_of(self.p) != version
        return not torch.equal(local(self.p.detach()).view(torch.int16), local(seen).view(torch.int16))

    def bypassed(self) -> str:
        """Return what the optimizer has written to itself; "" if nothing. Let `undo` restore the weights."""
        if self._have_weights_changed():
            self._weight_before = self._real_weights[1] if self._weight_before is None else self._weight_before
            return "parameter"
        grad, version = self._real_gradient
        return "" if self.p.grad is grad and _version(grad) == version else "the gradient of parameter"

    def show_trial_point(self) -> None:
        """Before a closure: give the parameter the weights of the shadow, rounded to nearest, and its gradient."""
        self.hand_back(is_blind=True)
        self.keep_gradient()
        if self._weight_before is None and self._is_moved():
            self._weight_before = self._real_weights[1]
        if self._weight_before is not None:
            self.p.copy_(self.q)  # the shadow keeps the exact values

    def _is_moved(self) -> bool:
        """Return whether the step has changed the weights of the shadow so far."""
        if not shows_values(self.q):
            return True
        weights = torch.empty_like(local(self.p), dtype=torch.float32, requires_grad=False)
        self.weight.held.read(self.segment, weights)
        return not torch.equal(weights.view(torch.int32), local(self.q.detach()).view(torch.int32))

    def take_evaluation(self) -> None:
        """After a closure: show the optimizer the new gradient, and accept it if the closure has changed weights."""
        grad = self.p.grad
        self.gradient = None
        if grad is not None and grad.layout is torch.strided:
            self.gradient = Piece(Gradient(self.p), self.segment, "")
            self.gradient.place_in(None, local(self.p) if self._sight.one_layout else local(grad))
            self.gradient.x.copy_(held_part(self.p, grad))
        self.show_gradient()
        if self._have_weights_changed():
            self._remember_weights()

    def undo(self) -> None:
        """After the step raised, restore the weights, and the gradient: the object and its values."""
        if self._gradient_before is not None:
            grad, values = self._gradient_before
            self.p.grad = grad
            if grad is not None and values is not None and grad.layout is torch.strided and _can_be_written(grad):
                grad.copy_(values)
        if self._weight_before is not None:
            self.p.copy_(self._weight_before)


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else version_of(grad)


def _can_be_written(grad: Tensor) -> bool:
    """Return whether each element has memory of its own. In an expanded gradient, many elements share theirs."""
    return all(size < 2 or stride for size, stride in zip(grad.shape, local(grad).stride(), strict=True))
