"""The FP32 gradients and state of whole parameters, which a step sees beside their FP32 weights, the shadows.

A step may set a gradient to None, replace it, or write to it. Afterwards the same is done to the gradient of the real
parameter, in its own dtype. A gradient that the step leaves alone is not touched. State moves to the key of the shadow
for the length of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hmpx.rounding.xla import is_lazy
from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.segment import Segment, laid_as
from hmpx.updates.holding.state_dtypes import as_fp32, is_bf16, is_moment, keeps_bf16
from hmpx.updates.holding.state_forms import form_of, written
from hmpx.updates.holding.state_tensors import HeldState, held, is_coded
from hmpx.updates.ranks.sharding import PLAIN, is_sharded, local
from hmpx.updates.stepping.step_call import hides_writes

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class ShadowGradients:
    """The gradients of whole shadows; under `torch.no_grad()`.

    one_layout: whether they lie in memory as the weights do.
    """

    def __init__(self, one_layout: bool) -> None:
        self._one_layout = one_layout
        self._shown: dict[Parameter, tuple[Tensor | None, int]] = {}
        self._before: dict[Parameter, tuple[Tensor | None, Tensor | None]] = {}

    def show(self, p: Parameter, q: Parameter) -> None:
        """Give the shadow `q` an FP32 copy of the gradient of `p`."""
        if p.grad is None:
            q.grad = None
        elif self._one_layout and p.grad.layout is torch.strided and not is_sharded(p.grad):
            q.grad = laid_as(p.grad.detach(), q, torch.float32)
        else:
            q.grad = p.grad.detach().to(torch.float32, copy=True)
        self._shown[p] = q.grad, 0 if q.grad is None else q.grad._version

    def keep(self, p: Parameter) -> None:
        """Before a write to the gradient of `p`, keep a copy for `undo`."""
        if p not in self._before:
            self._before[p] = p.grad, None if p.grad is None else p.grad.detach().clone()

    def hand_back(self, p: Parameter, q: Parameter) -> None:
        """Give the gradient of `p` the changes that the step made to the gradient of `q`."""
        shown, version = self._shown[p]
        left = q.grad
        if left is shown and (left is None or _is_as_shown(p.grad, left, version)):
            return
        self.keep(p)
        if left is not None and left is shown and p.grad is not None and can_be_written(p.grad):
            p.grad.copy_(left)
        else:
            own = p.grad.dtype if p.grad is not None else getattr(p, "grad_dtype", None) or p.dtype
            p.grad = None if left is None else left.detach().to(own, copy=True)

    def undo(self) -> None:
        """Restore every gradient, object and values, after the step raised."""
        for p, (grad, values) in self._before.items():
            p.grad = grad
            if grad is not None and values is not None and grad.layout is torch.strided and can_be_written(grad):
                grad.copy_(values)


def can_be_written(grad: Tensor) -> bool:
    """Whether each element has its own memory, unlike in an expanded gradient."""
    return all(size < 2 or stride for size, stride in zip(grad.shape, local(grad).stride(), strict=True))


def _is_as_shown(real: Tensor | None, left: Tensor, version: int) -> bool:
    """Whether a gradient is unchanged, by value too: a write through `.data` or by a fused kernel has no version."""
    if left._version != version or real is None:
        return False
    if is_lazy(left) or left.layout is not torch.strided:
        return True
    return torch.equal(local(left).to(real.dtype), local(real))


class ShadowState:
    """The state of one whole parameter, under the key of its shadow from `show` until `finish` or `undo`.

    one_layout: whether moments lie in memory as the shadow does.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, segment: Segment, shadow: Tensor, key: RoundingKey, one_layout: bool
    ) -> None:
        self._optimizer, self._segment, self._shadow, self._key = optimizer, segment, shadow, key
        self._form = form_of(segment)
        self._as_left = self._form.as_left  # whether the parameter keeps state as the step leaves it
        self._states, self._one_layout = optimizer.state, one_layout
        self._before = self._states.get(segment.param)
        self._kept = {k: list(v) if isinstance(v, list) else v for k, v in _items(self._before)}
        self._versions = [(t, t._version) for _, value in _items(self._before) for t in _tensors(value)]

    def show(self) -> None:
        """Give the state to the shadow. If that raises, for want of memory, `undo` finds it where it was."""
        if self._before is not None:
            shown = self._shown(self._before)
            self._states.pop(self._segment.param)
            self._states[self._shadow] = shown

    def _shown(self, before: Any) -> Any:
        """Return the state that the step sees; the same object if nothing has to be copied."""
        if not isinstance(before, dict):
            return before
        like = self._shadow if self._one_layout else None
        if self._as_left and not is_coded(before) and (like is None or _are_contiguous(like, *before.values())):
            return before
        seen = held(before, self._segment.param) if is_coded(before) else before
        shown = {key: value.whole() if isinstance(value, HeldState) else value for key, value in seen.items()}
        if not self._as_left:
            shown = {key: as_fp32(value) for key, value in shown.items()}
        for key, value in shown.items():
            if like is None:
                break
            if is_moment(value) and value.shape == like.shape and local(value).stride() != local(like).stride():
                shown[key] = laid_as(value, like, value.dtype)
        return before if seen is before and all(shown[k] is v for k, v in before.items()) else shown

    def finish(self) -> None:
        """Give the state that the step left to the parameter."""
        left = self._states.pop(self._shadow, None)
        if left is None:
            return
        if isinstance(left, dict) and not self._as_left:
            before = held(self._before or {}, self._segment.param)
            after: dict[str, Any] = {}
            for key, value in left.items():
                after.update(written(self._form, self._segment, key, value, before.get(key), self._key))
            left.clear()
            left.update(after)
        elif self._before is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
            keeps_bf16(self._optimizer)
        self._states[self._segment.param] = left

    def undo(self) -> str | None:
        """Give the parameter its old state again after the step raised.

        Returns:
            The parameter's name if the step has written to that state in place, which cannot be undone.
        """
        self._states.pop(self._shadow, None)
        if self._before is None:
            return None
        if isinstance(self._before, dict):
            self._before.clear()
            self._before.update(self._kept)
        self._states[self._segment.param] = self._before
        is_blind = hides_writes(self._optimizer)
        is_written = any(is_blind or tensor._version != version for tensor, version in self._versions)
        return self._segment.name if is_written else None


class GatheredState(ShadowState):
    """The state of a sharded parameter for a step that sees it whole; this rank keeps its part of the result.

    State of another shape than the parameter, such as factored moments, is whole on every rank, and the same.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._as_left = False

    def _shown(self, before: Any) -> Any:
        return {key: _gathered(value) for key, value in held(before, self._segment.param).items()}


def _are_contiguous(*values: Any) -> bool:
    """Whether all tensors among these are plain and contiguous, and so have one layout."""
    for value in values:  # a loop, as every step asks this of every small parameter
        if isinstance(value, Tensor) and not (type(value) in PLAIN and value.is_contiguous()):
            return False
    return True


def _items(state: Any) -> Iterable[tuple[str, Any]]:
    return state.items() if isinstance(state, dict) else ()


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, list) else []


def _gathered(value: Any) -> Any:
    """Return a copy of a state value in FP32, whole."""
    value = value.whole() if isinstance(value, HeldState) else value
    if not isinstance(value, Tensor):
        return value
    return as_fp32(value.full_tensor() if is_sharded(value) else value.clone())
