"""The FP32 shadows of whole parameters, with their gradients, and the state that is shown for them.

A step may set a gradient to None, replace it, or write to it. Afterwards the same is done to the gradient of the real
parameter, in its own dtype. A gradient that the step leaves alone is not touched. State moves to the key of the shadow
for the length of the step.
"""

from __future__ import annotations

from typing import Any

import torch

from hmpx.base.torch_private import version_of
from hmpx.rounding.devices import shows_values
from hmpx.rounding.native import PLAIN
from hmpx.updates.holding.segment import Segment, laid_as
from hmpx.updates.holding.state_dtypes import as_fp32, is_moment
from hmpx.updates.holding.state_forms import StateForm
from hmpx.updates.holding.state_tensors import HeldState, held_states, is_coded
from hmpx.updates.holding.stores import Store
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class Shadow:
    """The FP32 shadow of one whole parameter, a real Parameter, with its gradient; under `torch.no_grad()`.

    Args:
        one_layout: whether gradient and moments lie in memory as the shadow does.
        gathers: whether the shadow is the whole of a sharded parameter.

    Attributes:
        q: the shadow. An optimizer finds the attributes of `p` on it, such as a weight-decay flag.
    """

    def __init__(self, segment: Segment, store: Store, *, one_layout: bool, gathers: bool) -> None:
        self.segment, self.p, self.store = segment, segment.param, store
        self.one_layout, self.gathers = one_layout, gathers
        weight = torch.empty_like(self.p, dtype=torch.float32, requires_grad=False)
        store.begin()
        store.read(segment, local(weight))
        self.q = Parameter(self._whole(weight), requires_grad=self.p.requires_grad)
        for mark, value in () if gathers else vars(self.p).items():
            vars(self.q).setdefault(mark, value)  # not the attributes of a DTensor, which `q` has
        self._weight_before: Tensor | None = None  # which a trial point of a closure has overwritten
        self._gradient_before: tuple[Tensor | None, Tensor | None] | None = None  # the object, and its values
        self.show_gradient()
        self.look()

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if self.gathers and is_sharded(tensor) else tensor

    def own_part(self) -> Tensor:
        """Return this rank's part of the shadow."""
        return held_part(self.p, self.q.detach())

    def look(self) -> None:
        """Remember the weights: nothing but a closure may change them."""
        self._seen = version_of(self.p), self.p.detach().clone()

    def _has_changed(self) -> bool:
        version, seen = self._seen
        if version_of(self.p) != version or not shows_values(self.p):
            return version_of(self.p) != version
        return not torch.equal(local(self.p.detach()).view(torch.int16), local(seen).view(torch.int16))

    def is_bypassed(self) -> bool:
        """Whether the step has written to the parameter itself, which `undo` then takes back."""
        if not self._has_changed():
            return False
        if self._weight_before is None:
            self._weight_before = self._seen[1]
        return True

    def show_gradient(self) -> None:
        """Give the shadow an FP32 copy of the gradient, in the layout of the weights where the optimizer wants that."""
        grad, q = self.p.grad, self.q
        grad = grad if grad is None else self._whole(grad)
        if grad is None:
            q.grad = None
        elif self.one_layout and grad.layout is torch.strided and not is_sharded(grad):
            q.grad = laid_as(grad.detach(), q, torch.float32)
        else:
            q.grad = grad.detach().to(torch.float32, copy=True)
        self._shown = q.grad, 0 if q.grad is None else version_of(q.grad)

    def hand_back(self) -> None:
        """Give the parameter's gradient the changes that the step made to the shadow's."""
        p, left, (shown, version) = self.p, self.q.grad, self._shown
        is_shown, is_written = left is shown, left is not None and version_of(left) != version
        # A gathered parameter is stepped by a class of torch, which raises the version of what it writes to.
        if is_shown and not is_written and (left is None or self.gathers or _is_as_shown(p.grad, left)):
            return
        if self.gathers and is_sharded(p) and left is not None:
            left = like(p, held_part(p, left))
        self._keep_gradient()
        if left is not None and is_shown and p.grad is not None and can_be_written(p.grad):
            p.grad.copy_(left)
        else:
            own = p.grad.dtype if p.grad is not None else getattr(p, "grad_dtype", None) or p.dtype
            p.grad = None if left is None else left.detach().to(own, copy=True)

    def _keep_gradient(self) -> None:
        """Keep a copy of the parameter's gradient for `undo`."""
        if self._gradient_before is None:
            grad = self.p.grad
            self._gradient_before = grad, None if grad is None else grad.detach().clone()

    def show_trial_point(self) -> None:
        """Before a closure: give the parameter the shadow's weights, rounded to nearest, and its gradient."""
        self.hand_back()
        self._keep_gradient()
        if self._weight_before is None and self._is_moved():
            self._weight_before = self._seen[1]
        if self._weight_before is not None:
            self.p.copy_(self.q)  # the shadow keeps the exact values

    def take_evaluation(self) -> None:
        """After a closure: show the gradient that it has made, and accept the weights that it has changed."""
        self.show_gradient()
        if self._has_changed():
            self.look()

    def _is_moved(self) -> bool:
        """Whether the step has changed the weights since it got them."""
        shown = torch.empty_like(self.q, requires_grad=False)
        self.store.read(self.segment, local(shown))
        return not shows_values(self.q) or not torch.equal(local(shown), local(self.q.detach()))

    def undo(self) -> None:
        """Restore weights and gradient, object and values, after the step raised."""
        if self._gradient_before is not None:
            grad, values = self._gradient_before
            self.p.grad = grad
            if grad is not None and values is not None and grad.layout is torch.strided and can_be_written(grad):
                grad.copy_(values)
        if self._weight_before is not None:
            self.p.copy_(self._weight_before)


def can_be_written(grad: Tensor) -> bool:
    """Whether each element has its own memory, unlike in an expanded gradient."""
    return all(size < 2 or stride for size, stride in zip(grad.shape, local(grad).stride(), strict=True))


def _is_as_shown(real: Tensor | None, left: Tensor) -> bool:
    """Whether a gradient has the values that it had: a write through `.data` or by a fused kernel has no version."""
    if real is None:
        return False
    if not shows_values(left) or left.layout is not torch.strided:
        return True
    return torch.equal(local(left).to(real.dtype), local(real))


def seen_state(shadow: Shadow, form: StateForm, own: Any) -> dict[str, Any] | None:
    """Return copies of a parameter's state for its shadow; None if the step can see `own` itself.

    Where the shadow is gathered, state of its shape is, too. State of another shape, such as factored moments, is whole
    on every rank, and the same.
    """
    if not isinstance(own, dict):
        return None
    p, laid = shadow.p, shadow.q if shadow.one_layout else None
    if shadow.gathers:
        return {key: _gathered(value) for key, value in held_states(own, p).items()}
    if form.as_left and not is_coded(own) and (laid is None or _are_contiguous(laid, *own.values())):
        return None
    seen = held_states(own, p) if is_coded(own) else own
    shown = {key: value.whole() if isinstance(value, HeldState) else value for key, value in seen.items()}
    if not form.as_left:
        shown = {key: as_fp32(value) for key, value in shown.items()}
    if laid is not None:
        for key, value in shown.items():
            if is_moment(value) and value.shape == laid.shape and local(value).stride() != local(laid).stride():
                shown[key] = laid_as(value, laid, value.dtype)
    return None if seen is own and all(shown[key] is value for key, value in own.items()) else shown


def _are_contiguous(*values: Any) -> bool:
    """Whether all tensors among these are plain and contiguous, and so have one layout."""
    for value in values:  # a loop, as every step asks this of every small parameter
        if isinstance(value, Tensor) and not (type(value) in PLAIN and value.is_contiguous()):
            return False
    return True


def _gathered(value: Any) -> Any:
    """Return a copy of a state value in FP32, whole."""
    value = value.whole() if isinstance(value, HeldState) else value
    if not isinstance(value, Tensor):
        return value
    return as_fp32(value.full_tensor() if is_sharded(value) else value.clone())
