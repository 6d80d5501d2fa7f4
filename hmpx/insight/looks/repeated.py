"""Tries a cure of an inf or a NaN: the op again in FP32, then with the ops that have rounded its input.

The inputs of an iteration's last calls are kept for that, up to `_KEPT` bytes of them.
"""

from __future__ import annotations

import linecache
import re
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from hmpx.base.tensors import tensors_in
from hmpx.base.torch_private import LINES, version_of
from hmpx.insight.notes import OpCall, own_frame
from hmpx.insight.tensors import LOW, Tensor, called_in_fp32, view_of
from hmpx.ops.policies.catalog import canonical, catalog
from hmpx.ops.policies.composition import callers

_KEPT = 1 << 26  # bytes of inputs
_DEEP = 4  # ops behind one another that are computed in FP32, at most
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(eq=False)
class RepeatableCall:
    """A call of the forward pass that can be repeated, while its arguments are what they were.

    result: what it returned; key: where that lies. node: its number in autograd. size: of its arguments, in bytes.
    versions: of the tensors among these. line: of the innermost Python frame.
    """

    func: Any
    name: str
    args: tuple
    kwargs: dict[str, Any]
    result: weakref.ref[Tensor]
    key: tuple[int, torch.Size, torch.dtype]
    node: int | None
    size: int
    versions: list[int]
    line: tuple[str, int]

    @property
    def is_as_it_was(self) -> bool:
        return self.versions == [*map(version_of, tensors_in(self.args))]

    @property
    def names(self) -> tuple[str, ...]:
        """What lists call it: of the names that an op may have, those that the line has."""
        text, name = linecache.getline(*self.line), canonical(self.name.strip("_"))
        known = {each: catalog().get(each) for each in (name, *callers(self.name))}
        every = [each for each, op in known.items() if op is not None and op.computes]
        written = [each for each in every if re.search(rf"\b{each}\b", text) or (each == "matmul" and "@" in text)]
        return tuple(written or every)


class Calls:
    """The last calls of an iteration's forward pass."""

    def __init__(self) -> None:
        self._calls: deque[RepeatableCall] = deque()
        self._made: dict[tuple[int, torch.Size, torch.dtype], RepeatableCall] = {}
        self._of_node: dict[int, RepeatableCall] = {}
        self._bytes = 0

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def keep(self, op: OpCall, node: int | None) -> None:
        """Keep a call, and forget the oldest ones."""
        if not op.results:
            return
        given, key = [*tensors_in(op.args)], view_of(op.out)
        size = sum(each.numel() * each.element_size() for each in given)
        if op.name.endswith("_") or "out" in op.kwargs or _RANDOM in op.func.tags or size > _KEPT:
            self._made.pop(key, None)
            return
        frame = own_frame(op.frame)
        line = frame.f_code.co_filename, frame.f_lineno
        versions = [version_of(each) for each in given]
        call = RepeatableCall(
            op.func, op.name, op.args, op.kwargs, weakref.ref(op.out), key, node, size, versions, line
        )
        self._calls.append(call)
        if not any(view_of(each) == key for each in given):
            self._made[key] = call
        if node is not None:
            self._of_node.setdefault(node, call)
        self._bytes += size
        while self._bytes > _KEPT:
            old = self._calls.popleft()
            self._bytes -= old.size
            if self._made.get(old.key) is old:
                del self._made[old.key]
            if old.node is not None and self._of_node.get(old.node) is old:
                del self._of_node[old.node]

    def of(self, op: OpCall) -> RepeatableCall | None:
        """Return a call of the forward pass: this op, or the one whose backward pass it is part of."""
        if op.node is None:
            return next((each for each in reversed(self._calls) if each.result() is op.out), None)
        return None if LINES.missing else self._of_node.get(op.node._sequence_nr())

    def cure(self, call: RepeatableCall, backward: bool) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """Return the ops that must be in FP32 so that a call is finite, under their names in lists, and in words.

        First the call itself, then those that have rounded its input. Empty if nothing helps; None if it was not tried,
        since what it was given is gone.

        Args:
            backward: whether the gradient of the call is to be finite, too.
        """
        for depth in range(_DEEP + 1):
            last: dict[RepeatableCall, None] = {}
            try:
                with torch.random.fork_rng(devices=()), torch.set_grad_enabled(backward):
                    is_finite = self._is_finite(call, depth, last)
            except _Gone:
                return None if depth == 0 else ((), ())
            if is_finite:
                rounded = [each for each in last if each is not call]
                listed = dict.fromkeys(name for each in (call, *rounded) for name in each.names)
                return tuple(listed), tuple(dict.fromkeys(each.names[0] for each in rounded))
            if depth and not last:
                break
        return (), ()

    def _is_finite(self, call: RepeatableCall, depth: int, last: dict[RepeatableCall, None]) -> bool:
        given = [self._wide(each, depth, last).detach() for each in tensors_in(call.args) if each.is_floating_point()]
        for each in given if torch.is_grad_enabled() else ():
            each.requires_grad_(True)
        left = iter(given)
        made = _run(call, lambda each: next(left) if each.is_floating_point() else each)
        every = [each for each in tensors_in((made,)) if each.is_floating_point()]
        if torch.is_grad_enabled():
            seeds = [each for each in every if each.requires_grad]
            grads = torch.autograd.grad(seeds, given, [*map(torch.ones_like, seeds)], allow_unused=True)
            every += [each for each in grads if each is not None]
        return all(bool(each.isfinite().all()) for each in every)

    def _wide(self, tensor: Tensor, depth: int, last: dict[RepeatableCall, None]) -> Tensor:
        """Return a tensor with so many ops before it computed in FP32. last: gets the first of these."""
        made = self._made.get(view_of(tensor))
        if tensor.dtype not in LOW or made is None:
            return tensor.detach().float() if tensor.dtype in LOW else tensor.detach()
        if not made.is_as_it_was:
            raise _Gone
        is_cast = made.name == "_to_copy"
        if is_cast and made.args[0].dtype not in LOW:
            return made.args[0].detach()
        moves = is_cast or not made.names
        if not depth and not moves:
            return tensor.detach().float()
        if depth == 1 and not moves:
            last[made] = None
        return _run(made, lambda each: self._wide(each, depth - (not moves), last))


class _Gone(Exception):
    """What an op was given is no longer what it was."""


def _run(call: RepeatableCall, of: Any) -> Any:
    if not call.is_as_it_was:
        raise _Gone
    return called_in_fp32(call.func, call.args, call.kwargs, of)
