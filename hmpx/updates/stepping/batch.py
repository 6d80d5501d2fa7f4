"""A batch: the segments that an optimizer sees in one call of its own step.

The optimizer sees some FP32 tensors themselves (`Shown` says which). Of all other tensors it sees FP32 copies in the
room of the step. A transfer fills the copies before the call, and writes them back after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any

import torch

from hmpx.base.torch_private import dispatch_modes, version_of
from hmpx.rounding.table import Table
from hmpx.updates.holding.held import RoundingKey, Segment
from hmpx.updates.ranks.sharding import is_sharded, local
from hmpx.updates.stepping.shown import CountClone, Shown, StepContext
from hmpx.updates.stepping.step_call import StepCall, WriteBack, hides_writes
from hmpx.updates.stepping.transfers import Launches, Operators

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class Batch:
    """Segments, and other parameters, which are stepped as they are. The methods need `torch.no_grad()`.

    Attributes:
        others: parameters that are not BF16, each with the index of its group.
        size: how many elements of the room its copies take.
        counts: clones of the step counts of parameters of which this batch has a part.
        is_settled: whether the last step has left all state in the tensors that the optimizer was shown.
    """

    def __init__(self, segments: list[Segment], context: StepContext) -> None:
        self.segments, self.size = segments, 0
        self._states, self._shown = context.optimizer.state, list[Shown]()
        for segment in segments:
            self._shown.append(Shown(segment, context, self.size))
            self.size = self._shown[-1].end
        self.counts: list[CountClone] = [count for each in self._shown for count in each.counts]
        self.others: list[tuple[int, Parameter]] = []
        self._lists: list[list[Any]] = [[] for _ in context.optimizer.param_groups]
        self._names, self._late, self.is_settled = [segment.name for segment in segments], context.late, True
        self._versions: list[int] = []
        self._can_be_as_shown = all([each.can_be_as_shown for each in self._shown])

    def kernels(self) -> ModuleType | None:
        """Return the kernels that can move every tensor of this batch; None if there are none."""
        found = {each.kernels() for each in self._shown}
        return found.pop() if len(found) == 1 else None

    def place_in(self, room: Tensor, table: Table | None, gradients: list[Tensor]) -> None:
        """Make the shadows and their state, and put the copies into this room.

        Args:
            table: gets the launches of the kernels that move this batch. None: torch's operators move it.
            gradients: those of all parameters of the step.
        """
        for each in self._shown:
            each.place_in(room)
            self._lists[each.group].append(each.shadow)
        for group, p in self.others:
            self._lists[group].append(p)
        copied = [(each.index, each.grad) for each in self._shown if each.grad is not None]
        moved = [piece for each in self._shown for piece in each.pieces if piece.is_moved]
        self._copied, grads = [index for index, _ in copied], [grad for _, grad in copied]
        self._transfer: Launches | Operators
        if table is None:
            self._transfer = Operators(grads, moved)
        else:
            self._transfer = Launches(grads, self._copied, gradients, moved, table)
        self._ready = [each for each in self._shown if each.grad is None]
        self._shadows = [each.shadow for each in self._shown]
        self._new = {each.shadow: state for each in self._shown if (state := each.state) is not None}
        self._given = [self._new.get(shadow) for shadow in self._shadows]
        self._copies: list[dict[str, Any]] = [self._new[each.shadow] for each in self._shown if each.shows_copies]
        self._keys, self._values = list(chain(*self._copies)), values_of(self._copies)
        self._versioned = [(tensor, each.segment.name) for each in self._shown for tensor in each.versioned]
        self._sharded = [each.segment for each in self._shown if each.segment.box is not None]

    def step(self, call: StepCall, write_back: WriteBack, gradients: list[Tensor]) -> Any:
        """Step every segment of this batch. If the optimizer raises, weights and gradients are as they were.

        State and masters are, too, unless the optimizer has written to the held tensors themselves: these cannot be
        restored, and `write_back.written` gets the names of their parameters.

        Args:
            gradients: those of all parameters of the step, as this rank holds them.
        """
        optimizer, key, written = call.optimizer, write_back.rounding_key, write_back.written
        lists, self._versions = ShownParameters([], []), []
        try:
            lists = self._show(optimizer, write_back, gradients)
            with lists:
                result = self._run(call, write_back, lists)
            self._hand_back(optimizer, write_back, gradients)
            written.append(self._names)
            self._write(key)
            self._take(optimizer, key)
            key.flush()
        except BaseException:
            lists.hide()  # an interrupt may have come while they were shown or hidden
            key.pending.clear()
            written.append(self._written(optimizer))
            self._undo()
            raise
        return result

    def _show(self, optimizer: Optimizer, write_back: WriteBack, gradients: list[Tensor]) -> ShownParameters:
        """Fill the shadows and their state. Return the block in which `param_groups` hold the shadows."""
        for each in self._ready:
            grad = gradients[each.index]
            each.shadow.grad = each.segment.of(grad).data if grad.layout is torch.strided else grad.float()
        self._transfer.read([gradients[index] for index in self._copied])
        self._grads: list[Any] = [shadow.grad for shadow in self._shadows]
        self._seen, self._versions = _versions(self._grads), [version_of(tensor) for tensor, _ in self._versioned]
        self._states.update(self._new)  # a dict knows the hashes of its keys, which tensors compute in Python
        return ShownParameters([group["params"] for group in optimizer.param_groups], self._lists)

    def _run(self, call: StepCall, write_back: WriteBack, lists: ShownParameters) -> Any:
        return call.run()

    def _write(self, key: RoundingKey) -> None:
        self._transfer.write(key)
        for segment in self._sharded:
            segment.mark_written()

    def _take(self, optimizer: Optimizer, key: RoundingKey) -> None:
        """Move the state that the step has left for the shadows to the parameters."""
        left = self._states_left()
        self.is_settled = self._is_as_shown(left)
        if not self.is_settled:
            self.is_settled = not any([e.take(s, optimizer, key) for e, s in zip(self._shown, left, strict=True)])

    def _undo(self) -> None:
        self._grads = []
        for each in self._shown:
            each.undo()

    def _written(self, optimizer: Optimizer) -> list[str]:
        """Return the names of the parameters whose masters or state the optimizer has written in place."""
        is_blind, pairs = hides_writes(optimizer), zip(self._versioned, self._versions, strict=False)
        return [name for (tensor, name), version in pairs if is_blind or version_of(tensor) != version]

    def is_as_made(self) -> bool:
        """Whether the next step may use this batch again: all state is in the tensors that the optimizer was shown."""
        return self.is_settled and all([each.is_as_made() for each in self._shown])

    def _is_as_shown(self, left: list[Any]) -> bool:
        """Whether the step has left the very tensors that it was shown. Most steps do, and then no state moves."""
        if self._late or not self._can_be_as_shown or not all(map(is_, left, self._given)):
            return False
        values = values_of(self._copies)
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return is_same and list(chain(*self._copies)) == self._keys

    def _states_left(self) -> list[Any]:
        """Take the state of the shadows out of the optimizer's state, and return it.

        Where they come last there, `popitem` takes it, which hashes no key: tensors compute their hashes in Python.
        """
        states, shadows = self._states, self._shadows
        if len(states) >= len(shadows) and all(map(is_, reversed(states), reversed(shadows))):
            return [states.popitem()[1] for _ in shadows][::-1]
        return [states.pop(shadow, None) for shadow in shadows]

    def _hand_back(self, optimizer: Any, write_back: WriteBack, gradients: list[Tensor]) -> None:
        """Make the changes that the step has made to the shadows' gradients in the parameters' gradients, too."""
        left: list[Any] = [shadow.grad for shadow in self._shadows]
        # Versions do not tell of two kinds of writes: of fused kernels to gradients that a GradScaler has scaled, and
        # of foreach kernels while a dispatch mode is on.
        is_hidden = getattr(optimizer, "grad_scale", None) is not None or dispatch_modes() > 0
        versions = _versions(left)
        if is_hidden or not all(map(is_, left, self._grads)) or versions != self._seen:
            write_back.written.append(self._names)
            changes = zip(self._shown, left, self._grads, versions, self._seen, strict=True)
            for each, now, grad, version, seen in changes:
                if is_hidden or now is not grad or version != seen:
                    gradients[each.index] = hand_back(each.segment, gradients[each.index], now)
                    each.rest()
        self._grads = []
        for each in self._ready:
            each.rest()


class ShownParameters:
    """A block in which the lists of `param_groups` hold other parameters. The lists stay the same objects."""

    def __init__(self, lists: list[list[Any]], shown: list[list[Any]]) -> None:
        self._lists, self._shown = lists, shown
        self._before: list[list[Any]] = []

    def show(self) -> None:
        self._before = [list(params) for params in self._lists]
        for params, shown in zip(self._lists, self._shown, strict=True):
            params[:] = shown

    def hide(self) -> None:
        for params, before in zip(self._lists, self._before, strict=False):
            params[:] = before

    def are_as_shown(self) -> bool:
        """Whether the lists hold what they were shown with."""
        return all(map(are_same, self._lists, self._shown))

    def __enter__(self) -> None:
        self.show()

    def __exit__(self, *exception: object) -> None:
        self.hide()


def hand_back(segment: Segment, held: Any, left: Tensor | None, *, is_replaced: bool = False) -> Any:
    """Change the gradient of a parameter as the step has changed the gradient of its shadow.

    Args:
        held: the parameter's gradient, or this rank's part of it.
        left: the shadow's gradient after the step.
        is_replaced: whether a copy of `left` becomes the gradient. Otherwise `held` gets the values of `left`.

    Returns:
        The gradient of the parameter, or this rank's part of it. It may be another tensor than `held`.
    """
    p = segment.param
    if left is None:
        p.grad = None if segment.is_last else p.grad
        return held
    if held is None or is_replaced or left.layout is not torch.strided:
        dtype = p.grad.dtype if p.grad is not None else getattr(p, "grad_dtype", None) or p.dtype
        p.grad = left.detach().to(dtype, copy=True)
        return local(p.grad)
    if not can_be_written(held):
        p.grad = segment.grad.clone(memory_format=torch.contiguous_format)
        held = local(p.grad)
    (held if is_sharded(left) else segment.of(held)).copy_(left)
    return held


def can_be_written(grad: Tensor) -> bool:
    """Whether each element has memory of its own. In an expanded gradient, many elements share theirs."""
    return all(size < 2 or stride for size, stride in zip(grad.shape, local(grad).stride(), strict=True))


def _versions(grads: list[Any]) -> list[int]:
    return [0 if grad is None else version_of(grad) for grad in grads]


def are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    """Whether these are the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def values_of(states: Iterable[dict[str, Any]]) -> list[Any]:
    """Return all values of these dicts."""
    return list(chain.from_iterable(map(dict.values, states)))
