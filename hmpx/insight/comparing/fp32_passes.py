"""The runs in FP32 beside the run under the lists, `Low`: each computes every call of an op, but for what it says.

`Wide` also computes, beside each call, what the op alone makes of its FP32 inputs under the lists, and asks the
backward pass what that error does to the loss. `Shifted` asks that again, with weights that are shifted a little and
the decisions of `Wide`. In `Alone` some sites run under the lists. `Finite` finds where FP32 itself first makes inf or
NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked, Call, Compared, Number
from hmpx.insight.comparing.computing import as_listed, in_fp32, of_rounded_inputs, widened
from hmpx.insight.comparing.decisions import otherwise, taken, taken_again
from hmpx.insight.comparing.difference import Distance, in_full, product, square
from hmpx.insight.comparing.low_pass import Low, is_recomputing
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.tensors import Tensor, floating, is_masked
from hmpx.ops.wrapping.observing import Seen, unobserved


class Wide(Low):
    """Everything in FP32. What drew random numbers under the lists draws the same again.

    compare: whether calls are compared with those of `Low`.
    """

    def __init__(self, sites: Sites, compare: bool = True) -> None:
        super().__init__(sites)
        self._compare = compare

    def around(self, asked: Asked) -> Seen:
        with unobserved():
            again = is_recomputing()
            number = self._number(asked, again)
            kept = asked.site.calls.get(number)
            if kept is None:
                return asked.answer(self._exact(asked, number))
            _draw_again(kept)
            return asked.answer(self._result(asked, kept, number, again))

    def _exact(self, asked: Asked, number: Number, kept: Call | None = None) -> Any:
        """The op in FP32; its decisions are kept for `Shifted`, and held against those under the lists."""
        result = in_fp32(asked)
        if self._compare and torch._C._functorch.peek_interpreter_stack() is None:
            made = taken(asked.point.op, asked.args, asked.kwargs, result)
            if made is not None:
                again = number in asked.site.decisions
                asked.site.decisions[number] = made
                if kept is not None and kept.decisions and not again:
                    changed = otherwise(made.values, kept.decisions)
                    asked.site.decided += sum(value.numel() for value in made.values)
                    asked.site.otherwise += changed
                    if changed:
                        asked.site.changed_at.append((number[0], kept.order))
        return result

    def _result(self, asked: Asked, kept: Call, number: Number, again: bool) -> Any:
        if not self._compare:
            return in_fp32(asked)
        beside = self._beside(asked, kept) if kept.is_low else None
        result = self._exact(asked, number, kept)
        results = floating((result,))
        with torch.no_grad():
            wholes = [square(in_full(each)) for each in results] if kept.results else []
            if not again:
                self._accumulate(asked.site, kept, results, wholes)
            deltas = None if beside is None else self._measure(asked, beside, results, wholes, again)
        if deltas is not None:
            asked.site.deltas[number] = deltas
            _score_in_backward(asked.site.loss_change, asked, results, deltas)
            if again and torch.is_grad_enabled():
                asked.site.differentiable = True  # a checkpoint runs twice, first without gradients
            elif not any(each.requires_grad for each in results):
                asked.site.differentiable = False
        return result

    @staticmethod
    def _beside(asked: Asked, kept: Call) -> tuple[list[Tensor], list[Tensor] | None] | None:
        """What the op alone comes to under the lists, and what that is an error of; None for its FP32 result.

        An op that a list names is charged with what it makes of FP32 inputs. One that only follows its inputs is not
        charged with their rounding, which is that of the op that handed them on.
        """
        with torch.no_grad():
            low = as_listed(asked, kept)
            if low is None:
                return None
            _draw_again(kept)
            exact = floating((of_rounded_inputs(asked, kept),)) if kept.follows else None
            _draw_again(kept)
            return floating((low,)), exact

    def _measure(
        self,
        asked: Asked,
        beside: tuple[list[Tensor], list[Tensor] | None],
        results: list[Tensor],
        wholes: list[float],
        again: bool,
    ) -> list[Tensor | None]:
        """The errors of the results; None where there is none, for `relu` say."""
        low, exact = beside
        difference = Distance() if again else asked.site.alone
        deltas: list[Tensor | None] = []
        for a, b, whole in zip(low, exact or results, [None] * len(low) if exact else wholes, strict=False):
            if a.shape != b.shape:
                asked.site.not_compared = "its result has another shape in FP32"
                return []
            before = difference.error
            delta = difference.add(a, b, whole)
            deltas.append(delta if difference.error > before else None)
        return deltas

    def _accumulate(self, site: Compared, kept: Call, results: list[Tensor], wholes: list[float]) -> None:
        for low, exact, whole in zip(kept.results, results, wholes, strict=False):
            before = site.accumulated.nonfinite
            if low.shape == exact.shape:
                site.accumulated.add(low, exact, whole)
            if site.accumulated.nonfinite > before:
                site.first_wrong = site.first_wrong or (self._sites.batch, kept.order)
                wrong = ~torch.isfinite(low) & torch.isfinite(exact)
                site.largest = max(site.largest, float(exact.detach()[wrong].abs().max()))


class Shifted(Wide):
    """Everything in FP32, at shifted weights; errors and decisions are those that `Wide` has found."""

    def _exact(self, asked: Asked, number: Number, kept: Call | None = None) -> Any:
        return taken_again(asked.args, in_fp32(asked), asked.site.decisions.get(number))

    def _result(self, asked: Asked, kept: Call, number: Number, again: bool) -> Any:
        result = self._exact(asked, number)
        _score_in_backward(asked.site.shifted, asked, floating((result,)), asked.site.deltas.get(number, []))
        return result


class Alone(Wide):
    """Everything in FP32, but some sites as the lists say."""

    def __init__(self, sites: Sites, chosen: Collection[Compared]) -> None:
        super().__init__(sites, compare=False)
        self._chosen = chosen

    def _result(self, asked: Asked, kept: Call, number: Number, again: bool) -> Any:
        low = as_listed(asked, kept) if asked.site in self._chosen and kept.is_low else None
        if low is None:
            return in_fp32(asked)
        if not asked.site.accumulated.nonfinite and not _finite(low) and _finite(_apart(asked)):
            # A constant that a program takes from the dtype, as for masks, is that of FP32 here.
            asked.site.not_compared = "from what FP32 hands it, it overflows, and under the lists it does not"
            return in_fp32(asked)
        low = widened(low)
        if kept.follows:
            low = self._with_own_error(asked, kept, low)
        return asked.args[0].copy_(low) if asked.point.in_place else low

    @staticmethod
    def _with_own_error(asked: Asked, kept: Call, low: Any) -> Any:
        """The FP32 result with the error of an op that only follows its inputs: not with that of rounding these."""
        _draw_again(kept)
        rounded = of_rounded_inputs(asked, kept)
        _draw_again(kept)
        return tree_map(_added, low, rounded, _apart(asked))


def _apart(asked: Asked) -> Any:
    """What the op comes to in FP32; of one that writes to its first input, into a copy of that."""
    args = (asked.args[0].clone(), *asked.args[1:]) if asked.point.in_place else asked.args
    return in_fp32(asked.with_arguments(args, asked.kwargs))


def _added(low: Any, rounded: Any, exact: Any) -> Any:
    """exact + (low - rounded) where these are numbers."""
    if not isinstance(low, Tensor) or not low.dtype.is_floating_point or low.shape != exact.shape:
        return exact if isinstance(low, Tensor) else low
    error = low - rounded
    return torch.where(torch.isfinite(error.detach()), exact + error, low)


class Finite(Wide):
    """Everything in FP32. first: the first site that makes inf or NaN of finite inputs, but for the -inf of a mask."""

    def __init__(self, sites: Sites) -> None:
        super().__init__(sites, compare=False)
        self.first: Compared | None = None

    def around(self, asked: Asked) -> Seen:
        with unobserved():
            inputs = floating((asked.args, asked.kwargs))
            looks = self.first is None and not is_recomputing() and _finite(inputs)
        seen = super().around(asked)
        if looks:
            with unobserved():
                odd = next((each for each in floating((seen.result,)) if not _finite(each)), None)
                if odd is not None and not is_masked(asked.point.op, inputs, odd):
                    self.first = asked.site
        return seen


def _finite(values: Any) -> bool:
    return all(bool(torch.isfinite(each.detach()).all()) for each in floating((values,)))


def _score_in_backward(scores: list[float], asked: Asked, results: list[Tensor], deltas: list[Tensor | None]) -> None:
    """Let the backward pass add up what errors in the results of a call do to the loss, to first order."""
    for result, delta in zip(results, deltas, strict=False):
        handed_on = not asked.point.in_place and any(result is arg for arg in asked.args)
        if delta is not None and result.requires_grad and not handed_on and delta.shape == result.shape:
            result.register_hook(functools.partial(_score, scores, delta))


def _score(scores: list[float], delta: Tensor, gradient: Tensor) -> None:
    scores[-1] += product(gradient, delta)


def _draw_again(kept: Call) -> None:
    if kept.drawn is not None:
        generators.set_state(kept.drawn)
