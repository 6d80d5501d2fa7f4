"""The runs that score: everything in FP32, and beside each call what it would round in BF16.

`Scoring` is the run at the weights, `Rescoring` the same at shifted weights with the same roundings.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.comparing.computing import in_fp32
from hmpx.insight.comparing.passes import is_recomputing
from hmpx.insight.tensors import Tensor, floating
from hmpx.insight.tuning.charges import Charge, Edge, Scored
from hmpx.insight.tuning.found import Found
from hmpx.insight.tuning.raising import said
from hmpx.insight.tuning.roundings import Backward, Rounded, computed, difference, dot, moved, redrawing, rounded
from hmpx.ops.observing import Seen, unobserved

Call = tuple[Compared, int]  # a site, and which of its calls in a run
Sums = dict[tuple[int, int], float]  # of a charge, by batch and run


@dataclass
class Kept:
    """What the run at the weights leaves to those at shifted weights, of one batch, by call.

    forward: what is rounded, and for each input that is cast the edge that it comes by. backward: for each rounding of
    a gradient the position of the input whose it is, its charge, and the rounding.
    """

    forward: dict[Call, tuple[Rounded, dict[int, Edge]]] = field(default_factory=dict)
    backward: dict[Call, list[tuple[int, Charge, Tensor]]] = field(default_factory=dict)


class _Run:
    """A run in FP32 that adds up charges.

    found: the sites that can be scored. batch, run: whose charges these are, see `Charge`.
    """

    def __init__(self, found: Found, kept: Kept, batch: int, run: int) -> None:
        self._found, self._kept, self._key = found, kept, (batch, run)
        self._numbers: Counter[tuple[Compared, bool]] = Counter()
        self._dots: list[tuple[Sums, Tensor]] = []
        self._scored: list[Tensor] = []
        self._written = False  # whether a tensor may have been written to after it was scored

    def around(self, asked: Asked) -> Seen:
        with unobserved():
            kind = asked.site, is_recomputing()  # what a checkpoint makes again is counted on its own
            self._numbers[kind] += 1
            self._written = self._written or asked.point.in_place
            return asked.answer(self._result(asked, (asked.site, self._numbers[kind])))

    def _result(self, asked: Asked, call: Call) -> Any:
        raise NotImplementedError

    def wanted(self) -> list[Tensor] | None:
        """The tensors whose gradients are looked at, so that none need be computed for weights; None for all."""
        return None if self._written else self._scored

    def inputs(self) -> list[Tensor]:
        """Of what was scored, what no parameter's gradient comes by."""
        return [each for each in self._scored if each.is_leaf]

    def settle(self) -> None:
        """Add up what the run has found: once, so that a device is waited for once."""
        if self._dots:
            values = torch.stack([value.to("cpu", torch.float64) for _, value in self._dots]).tolist()
            for (sums, _), value in zip(self._dots, values, strict=True):
                sums[self._key] += value
        self._dots.clear()

    def _score_call(self, site: Scored, call: Call, asked: Asked, inputs: list[Tensor], results: list[Tensor]) -> None:
        """Let the backward pass tell what the roundings of a call do to the loss, to first order."""
        found, edges = self._kept.forward[call]
        for result, delta in zip(results, found.results, strict=False):
            if not any(result is given for given in inputs):
                self._score(result, site.charge.forward, delta)
        for i, edge in edges.items():
            if inputs[i].requires_grad:
                self._score(inputs[i], edge.down.forward, found.inputs[i])
            else:  # the op has no gradient for it
                for result, delta in zip(results, moved(asked, inputs, i, found.inputs[i], results), strict=True):
                    self._score(result, edge.down.forward, delta)

    def _score(self, tensor: Tensor, sums: Sums, delta: Tensor) -> None:
        if tensor.requires_grad:
            tensor.register_hook(functools.partial(self._add, sums, delta))
            self._scored.append(tensor)

    def _add(self, sums: Sums, delta: Tensor, value: Tensor) -> None:
        with unobserved(), torch.no_grad():
            self._dots.append((sums, dot(value, delta)))


class Scoring(_Run):
    """The run at the weights.

    names: the ops that lists may name. look: is handed each call that is scored, with its inputs.
    """

    def __init__(
        self,
        found: Found,
        kept: Kept,
        batch: int,
        names: Collection[str],
        look: Callable[[Scored, Asked, Rounded], None] | None = None,
    ) -> None:
        super().__init__(found, kept, batch, 0)
        self._names, self._look = names, look
        self._made: dict[int, Scored | None] = {}  # by memory, the site that made what is in it
        self._alive: list[Tensor] = []  # so that no memory is another tensor's later

    def _result(self, asked: Asked, call: Call) -> Any:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if asked.point.in_place or asked.point.op not in self._names or transformed:
            keeps_precision = asked.point.in_place or asked.point.op == "to"
            return in_fp32(asked) if keeps_precision else self._made_by(None, in_fp32(asked))
        known = self._kept.forward.get(call)
        if known is not None:  # a checkpoint makes it again
            return self._made_by(self._found.made(call[0]), computed(asked, known[0].inputs)[1])
        with redrawing() as drawn:
            found = self._rounded(asked)
        inputs, result = computed(asked, found.inputs if found is not None else ())
        results = floating((result,))
        if found is None or not results:
            return self._made_by(None, result)
        site = self._found.made(asked.site)
        if found.nonfinite:
            site.pinned = f"{found.nonfinite} values of a result are not finite in BF16"
        if any(each.requires_grad for each in results):
            self._kept.forward[call] = found, self._edges(site, asked, found)
            self._score_call(site, call, asked, inputs, results)
            self._score_backward(site, call, asked, inputs, results, drawn)
            site.scored = True
        if self._key[0] == 0:
            site.calls += 1
            if self._look is not None:
                self._look(site, asked, found)
        return self._made_by(site, result)

    def _rounded(self, asked: Asked) -> Rounded | None:
        try:
            return rounded(asked)
        except Exception as error:
            self._found.made(asked.site).pinned = f"it does not run in BF16: {said(error)}"
            return None

    def _made_by(self, site: Scored | None, result: Any) -> Any:
        for tensor in floating((result,)):
            self._made[_memory(tensor)] = site
            self._alive.append(tensor.detach())
        return result

    def _maker(self, tensor: Tensor) -> Scored | None:
        return self._made.get(_memory(tensor))

    def _edges(self, site: Scored, asked: Asked, found: Rounded) -> dict[int, Edge]:
        tensors = floating((asked.args, asked.kwargs))
        edges = {i: site.edges[self._maker(tensors[i])] for i in found.inputs}
        if self._key[0] == 0:
            for i, edge in edges.items():
                edge.casts += 1
                edge.elements += tensors[i].numel()
        return edges

    def _score_backward(
        self, site: Scored, call: Call, asked: Asked, inputs: list[Tensor], results: list[Tensor], drawn: Tensor
    ) -> None:
        """Let the backward pass tell what it would round: in this op in BF16, and where it hands a gradient on."""
        found, edges = self._kept.forward[call]
        kept = self._kept.backward[call] = []
        tensors = floating((asked.args, asked.kwargs))
        for i, edge in edges.items():
            if inputs[i].requires_grad and self._maker(tensors[i]) is not None:
                inputs[i].register_hook(functools.partial(self._handed_on, kept, edge.up, i, tensors[i].detach()))
        try:
            backward = Backward(asked, found, drawn)
        except Exception as error:
            site.pinned = f"it does not run in BF16: {said(error)}"
            return
        for which, result in enumerate(results):
            if result.requires_grad:
                result.register_hook(functools.partial(self._computed, kept, site, backward, which))

    def _handed_on(self, kept: list, charge: Charge, i: int, t: Tensor, gradient: Tensor) -> None:
        with unobserved(), torch.no_grad():
            self._rounds(kept, charge, i, t, difference(gradient.bfloat16(), gradient))

    def _computed(self, kept: list, site: Scored, backward: Backward, which: int, gradient: Tensor) -> None:
        with unobserved():
            try:
                roundings = [*backward.roundings(which, gradient)]
            except Exception as error:
                site.pinned = f"its backward pass does not run in BF16: {said(error)}"
                return
            for i, t, delta, finite in roundings:
                self._rounds(kept, site.charge, i, t, delta)
                if not finite and bool(torch.isfinite(gradient).all()):
                    site.pinned = site.pinned or "its gradient is not finite in BF16"

    def _rounds(self, kept: list, charge: Charge, i: int, t: Tensor, delta: Tensor) -> None:
        kept.append((i, charge, delta))
        self._dots.append((charge.backward, dot(t, delta)))


class Rescoring(_Run):
    """The run at weights that are shifted a little; the roundings are those that `Scoring` has found."""

    def __init__(self, found: Found, kept: Kept, batch: int, run: int) -> None:
        super().__init__(found, kept, batch, run)
        self._done: set[Call] = set()

    def _result(self, asked: Asked, call: Call) -> Any:
        known = self._kept.forward.get(call)
        if known is None:
            return in_fp32(asked)
        inputs, result = computed(asked, known[0].inputs)
        if not torch.is_grad_enabled() or call in self._done:  # a checkpoint runs twice
            return result
        self._done.add(call)
        self._score_call(self._found.made(call[0]), call, asked, inputs, floating((result,)))
        tensors = floating((asked.args, asked.kwargs))
        for i, charge, delta in self._kept.backward.get(call, ()):
            self._add(charge.backward, delta, tensors[i])
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
