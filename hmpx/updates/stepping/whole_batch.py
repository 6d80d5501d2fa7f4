"""Steps whole parameters: all those of an optimizer that may look across them, or one gathered from all ranks.

The optimizer is shown FP32 shadows. They are real Parameters in `param_groups`, and its state is under their keys, so
any optimizer computes in FP32 without knowing it. The model's own parameters are never swapped: a new `p.data` would
reset AccumulateGrad, and DDP would then stop synchronising without an error.

A step may set a gradient to None, replace it, or write to it. Then hmpx does the same to the gradient of the real
parameter, in its own dtype. It leaves a gradient alone that the step has left alone. What a step binds to a shadow as
an attribute is bound to the parameter. A shadow means nothing after its step, so a step that keeps one is refused.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch

from hmpx.base.torch_private import version_of
from hmpx.errors import HmpxError
from hmpx.rounding.devices import shows_values
from hmpx.updates.holding.held import RoundingKey, Segment, laid_as
from hmpx.updates.holding.state_dtypes import as_fp32, is_moment
from hmpx.updates.holding.state_forms import StateForm
from hmpx.updates.holding.state_tensors import HeldState, by_own_keys, held_states, is_coded
from hmpx.updates.holding.stores import Store
from hmpx.updates.holding.weights_in_state import find_weights, weight_keys
from hmpx.updates.ranks.sharding import held_part, is_sharded, like, local
from hmpx.updates.stepping.batch import Batch, ShownParameters, are_same, can_be_written, hand_back
from hmpx.updates.stepping.known_elsewhere import references, refuse_lookups
from hmpx.updates.stepping.optimizer_classes import by_memory
from hmpx.updates.stepping.shown import ShownState
from hmpx.updates.stepping.step_call import DeferredSignals, StepCall, WriteBack

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class WholeBatch(Batch):
    """A batch that is stepped once. If the optimizer holds others (Lookahead's base), they see the same shadows.

    gathers: whether the segments are sharded. Then the optimizer sees these parameters alone, whole; every rank
        computes the same, and keeps its part of the result.
    """

    def __init__(self, segments: list[Segment], *, gathers: bool = False) -> None:
        self.segments, self._gathers, self._names = segments, gathers, [segment.name for segment in segments]
        self._shadows: list[Shadow] = []  # type: ignore[assignment]
        self._shown_states: list[tuple[Shadow, ShownState]] = []
        self._versioned: list[tuple[Tensor, str]] = []
        self._of_members: list[dict[Any, Any]] = []  # the state of each optimizer
        self._groups: list[tuple[Optimizer, list[dict], list[list]]] = []  # of each optimizer: groups, lists in them

    def step(self, call: StepCall, write_back: WriteBack, gradients: list[Tensor]) -> Any:
        self._is_grad_on = torch.is_grad_enabled()
        with torch.no_grad():
            result = super().step(call, write_back, gradients)
        # The next batches need this memory
        self._shadows, self._shown_states, self._versioned, self._groups = [], [], [], []
        return result

    def _show(self, optimizer: Optimizer, write_back: WriteBack, gradients: list[Tensor]) -> ShownParameters:
        members = list(nested(optimizer))
        one_layout = by_memory(*members)
        for segment in self.segments:
            shadow = Shadow(segment, write_back.stores.of(segment), one_layout=one_layout, gathers=self._gathers)
            shadow.show()
            self._shadows.append(shadow)
        for member in members:
            for shadow in self._shadows:
                state = ShownState(member.state, shadow.segment, member.state.get(shadow.p), weight_keys(member))
                state.shown = seen_state(shadow, state.form, state.own)
                state.keeps_left &= not self._gathers
                self._shown_states.append((shadow, state))
                if not self._gathers:
                    self._watch(state)
                state.move_to(shadow.q)
        self._groups = [(each, groups := each.param_groups[:], lists_of(groups)) for each in members]
        lists = list({id(params): params for *_, of_one in self._groups for params in of_one}.values())
        shown = self._in_place_of(lists)
        self._of_members = [each.state for each in members]
        self._referred = self._references()
        return ShownParameters(lists, shown)

    def _in_place_of(self, lists: list[list]) -> list[list]:
        new = {shadow.p: shadow.q for shadow in self._shadows}
        return [[new.get(p, p) for p in params if p in new or not self._gathers] for params in lists]

    def _references(self) -> list[tuple[int, int, int]]:
        """Return how many references there are to each shadow, beside those that hmpx and `state` hold."""
        return references([shadow.q for shadow in self._shadows], chain(*self._of_members))

    def _watch(self, state: ShownState) -> None:
        """Remember the versions of the parameter's own state tensors: `_written` sees by them what a step writes."""
        values = [item for v in state.content.values() for item in (v if isinstance(v, list) else (v,))]
        tensors = [value for value in values if isinstance(value, Tensor)]
        self._versioned += [(tensor, state.segment.name) for tensor in tensors]
        self._versions += map(version_of, tensors)

    def _run(self, call: StepCall, write_back: WriteBack, lists: ShownParameters) -> Any:
        on_real = functools.partial(self._on_real_parameters, call.optimizer, write_back.signals, lists)
        try:
            with torch.set_grad_enabled(self._is_grad_on):
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
        kept = [
            are_same(each.param_groups, groups) and are_same(lists_of(groups), of_one)
            for each, groups, of_one in self._groups
        ]
        if not all(kept) or not lists.are_as_shown():
            raise HmpxError(
                f"{type(optimizer).__name__} changes param_groups, or a list of parameters in it, inside step(), while "
                "they hold the FP32 copies that hmpx steps: change them between two steps, or keep its weights in FP32"
            )

    def _on_real_parameters(
        self, optimizer: Optimizer, signals: DeferredSignals, lists: ShownParameters, closure: Callable
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
                    return signals.let_through(closure, args, kwargs)
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

    def _hand_back(self, optimizer: Optimizer, write_back: WriteBack, gradients: list[Tensor]) -> None:
        for shadow in self._shadows:
            if written := shadow.bypassed():
                raise HmpxError(
                    f"{type(optimizer).__name__} wrote to {written} {shadow.segment.name!r} itself: it "
                    "does not take its parameters from param_groups, so hmpx cannot step it in FP32"
                )
        if not self._gathers:
            refuse_lookups(optimizer, [shadow.q for shadow in self._shadows])
            self._refuse_references(optimizer)
        for shadow in self._shadows:
            shadow.hand_back()

    def _refuse_references(self, optimizer: Optimizer) -> None:
        """Refuse a step after which somebody still refers to a shadow, or to its memory."""
        for is_last in (False, True):
            pairs = zip(self._names, self._references(), self._referred, strict=True)
            kept = [name for name, now, was in pairs if now[0] > was[0] or (now[1] == was[1] and now[2] > was[2])]
            if not kept:
                return
            if not is_last:
                gc.collect()  # what refers to itself, as a caught exception may, is garbage
        raise HmpxError(
            f"{type(optimizer).__name__} keeps the FP32 copy of parameter {kept[0]!r}, or a view of it, that this step "
            "was shown, outside of its state: the next step has another copy, and would not find it there. Keep its "
            "weights in FP32, without hmpx.attach, or let it keep by parameter what it keeps in `state`"
        )

    def _write(self, key: RoundingKey) -> None:
        for shadow in self._shadows:
            shadow.write(key)
        key.flush()

    def _take(self, optimizer: Optimizer, key: RoundingKey) -> None:
        self._find_weights()
        for shadow, state in self._shown_states:
            state.take_from(shadow.q, optimizer, key)
        for shadow in self._shadows:
            shadow.take_marks()

    def _find_weights(self) -> None:
        """Find the weights in state that is new, before it is written."""
        new: dict[int, tuple[Any, list[tuple[str, Tensor, Tensor]]]] = {}
        for shadow, state in self._shown_states:
            is_asked = isinstance(state.weights, set) and not state.form.as_left and not self._gathers
            left = None if not is_asked else state.left_for(shadow.q)
            known = by_own_keys(state.content) if left else ()
            for key, value in (left or {}).items():
                if key not in known and key not in state.weights and is_moment(value) and value.shape == shadow.q.shape:
                    new.setdefault(id(state.weights), (state.weights, []))[1].append((key, value, shadow.q))
        for keys, found in new.values():
            find_weights(keys, found)

    def _undo(self) -> None:
        for member, groups, lists in self._groups:
            member.param_groups[:] = groups
            for group, params in zip(groups, lists, strict=True):
                group["params"] = params
        for shadow, state in self._shown_states:
            state.undo(shadow.q)
        for shadow in self._shadows:
            shadow.undo()


def lists_of(groups: list[dict]) -> list[list]:
    return [group["params"] for group in groups]


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield `optimizer` and every optimizer that it holds in an attribute, directly, in a list or in a dict."""
    found = [optimizer]
    for member in found:
        yield member
        for value in vars(member).values():
            inner = value.values() if isinstance(value, dict) else value
            inner = inner if isinstance(value, (list, tuple, dict)) else (value,)
            found += [o for o in inner if isinstance(o, Optimizer) and not any(o is seen for seen in found)]


class Shadow:
    """The FP32 shadow of one whole parameter, with its gradient. The methods need `torch.no_grad()`.

    Args:
        one_layout: whether the optimizer wants gradient and moments to lie in memory as the shadow does.
        gathers: whether the shadow is the whole of a sharded parameter.
        q: the shadow, if it stands already. It has the attributes of `p`, such as a weight-decay flag.
    """

    def __init__(
        self, segment: Segment, store: Store, q: Parameter | None = None, *, one_layout: bool, gathers: bool = False
    ) -> None:
        self.segment, self.p, self.store = segment, segment.param, store
        self.one_layout, self.gathers = one_layout, gathers
        if q is None:
            store.begin()
            q = Parameter(self._whole(self._read()), requires_grad=self.p.requires_grad)
        self.q, self._own = q, frozenset(vars(q))  # if `q` is a DTensor, it keeps the attributes of one
        self._marks: dict[str, Any] = {}
        self._weight_before: Tensor | None = None  # the weights that `undo` restores, once they are overwritten
        self._gradient_before: tuple[Tensor | None, Tensor | None] | None = None  # for `undo`: object, and values

    def show(self) -> None:
        """Show attributes and gradient, and look at the real weights."""
        self.show_marks()
        self.show_gradient()
        self.look()

    def resume(self, weights: tuple[int, Tensor], shown: tuple[Any, int], gradient: tuple[Any, int]) -> None:
        """Take it that these were seen when the step began: the real weights, the shown gradient and the real one."""
        self._seen, self._shown, self._real_gradient = weights, shown, gradient
        self._weight_before = self._gradient_before = None

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if self.gathers and is_sharded(tensor) else tensor

    def show_marks(self) -> None:
        """Bind to the shadow what is bound to the parameter, and nothing else."""
        self._marks = {} if self.gathers else {k: v for k, v in vars(self.p).items() if k not in self._own}
        for key in vars(self.q).keys() - self._own - self._marks.keys():
            delattr(self.q, key)
        vars(self.q).update(self._marks)

    def take_marks(self) -> None:
        """Bind to the parameter what the step has bound to the shadow."""
        left = {key: value for key, value in vars(self.q).items() if key not in self._own}
        if self.gathers or (left.keys() == self._marks.keys() and all(map(is_, left.values(), self._marks.values()))):
            return
        for key in self._marks.keys() - left.keys():
            delattr(self.p, key)
        vars(self.p).update(left)

    def _read(self) -> Tensor:
        weights = torch.empty_like(self.p, dtype=torch.float32, requires_grad=False)
        self.store.read(self.segment, local(weights))
        return weights

    def write(self, key: RoundingKey) -> None:
        """Write this rank's part of the result back."""
        self.segment.mark_written()
        self.store.write(self.segment, held_part(self.p, self.q.detach()), self.segment.name, key)

    def look(self) -> None:
        """Remember the real weights: while the step runs, only a closure may change them."""
        self._seen = version_of(self.p), self.p.detach().clone()

    def _has_changed(self) -> bool:
        version, seen = self._seen
        if version_of(self.p) != version or not shows_values(self.p):
            return version_of(self.p) != version
        return not torch.equal(local(self.p.detach()).view(torch.int16), local(seen).view(torch.int16))

    def bypassed(self) -> str:
        """Return what the optimizer has written to itself; "" if nothing. Let `undo` restore the weights."""
        if self._has_changed():
            self._weight_before = self._seen[1] if self._weight_before is None else self._weight_before
            return "parameter"
        grad, version = self._real_gradient
        return "" if self.p.grad is grad and _version(grad) == version else "the gradient of parameter"

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
        self._real_gradient = self.p.grad, _version(self.p.grad)

    def hand_back(self) -> None:
        """Change the parameter's gradient as the step has changed the shadow's."""
        p, left, (shown, version) = self.p, self.q.grad, self._shown
        is_shown, is_written = left is shown, left is not None and version_of(left) != version
        # Only classes of torch step gathered parameters, and they raise the version of each gradient that they write.
        if is_shown and not is_written and (left is None or self.gathers or _is_as_shown(p.grad, left)):
            return
        if self.gathers and is_sharded(p) and left is not None:
            left = like(p, held_part(p, left))
        self._keep_gradient()
        hand_back(self.segment, p.grad, left, is_replaced=not is_shown)

    def _keep_gradient(self) -> None:
        """Keep a copy of the parameter's gradient for `undo`."""
        if self._gradient_before is None:
            grad = self.p.grad
            self._gradient_before = grad, None if grad is None else grad.detach().clone()

    def show_trial_point(self) -> None:
        self.hand_back()
        self._keep_gradient()
        if self._weight_before is None and self._is_moved():
            self._weight_before = self._seen[1]
        if self._weight_before is not None:
            self.p.copy_(self.q)  # the shadow keeps the exact values

    def take_evaluation(self) -> None:
        self.show_gradient()
        if self._has_changed():
            self.look()

    def _is_moved(self) -> bool:
        """Whether the step has changed the weights of the shadow so far."""
        both = self._read(), self.q.detach()
        return not shows_values(self.q) or not torch.equal(*(local(each).view(torch.int32) for each in both))

    def undo(self) -> None:
        """After the step raised, restore the weights, and the gradient: the object and its values."""
        if self._gradient_before is not None:
            grad, values = self._gradient_before
            self.p.grad = grad
            if grad is not None and values is not None and grad.layout is torch.strided and can_be_written(grad):
                grad.copy_(values)
        if self._weight_before is not None:
            self.p.copy_(self._weight_before)


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None or grad.is_inference() else version_of(grad)


def _is_as_shown(real: Tensor | None, left: Tensor) -> bool:
    """Whether the shadow's gradient has its values still: `.data` and fused kernels write without a new version."""
    if real is None:
        return False
    if not shows_values(left) or left.layout is not torch.strided:
        return True
    now, shown = local(left), local(real).float()  # bits of this cast are fixed, those of a NaN cast to BF16 are not
    return now.dtype is torch.float32 and torch.equal(now.view(torch.int32), shown.view(torch.int32))


def seen_state(shadow: Shadow, form: StateForm, own: Any) -> dict[str, Any] | None:
    """Return copies of a parameter's state for its shadow; None if the optimizer can see `own` itself.

    If the shadow is gathered, state of its shape is gathered, too. State of another shape, such as factored moments, is
    whole already, and the same on every rank.
    """
    if not isinstance(own, dict):
        return None
    p, laid = shadow.p, shadow.q if shadow.one_layout else None
    if shadow.gathers:
        return {key: _gathered(value) for key, value in held_states(own, p).items()}
    shown = dict[str, Any]()
    for key, value in (held_states(own, p) if is_coded(own) else own).items():
        value = value.whole() if isinstance(value, HeldState) else value
        value = value if form.as_left else as_fp32(value)
        if laid is not None and is_moment(value) and value.shape == laid.shape:
            value = value if local(value).stride() == local(laid).stride() else laid_as(value, laid, value.dtype)
        shown[key] = value
    return None if shown.keys() == own.keys() and all(map(is_, shown.values(), own.values())) else shown


def _gathered(value: Any) -> Any:
    """Return a state value whole: a tensor as a copy, in FP32 if it was BF16; anything else as it is."""
    value = value.whole() if isinstance(value, HeldState) else value
    if not isinstance(value, Tensor):
        return value
    return as_fp32(value.full_tensor() if is_sharded(value) else value.clone())
