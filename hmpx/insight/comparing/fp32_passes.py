"""The passes in FP32, which are compared with the pass under the lists.

`Fp32Pass` computes every call in FP32. `ComparingPass` also computes, beside each call, the op alone as under the
lists, and asks the backward pass what its error does to the loss. `ShiftedPass` asks that again, with weights that are
shifted a little and the decisions of `ComparingPass`. In `AlonePass` some sites run as the lists say. `AdvisedPass` is
the contrary: some sites run in FP32, and all others as the lists say.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hmpx.insight import run_state
from hmpx.insight.comparing.calls import (
    Asked,
    Call,
    CallSite,
    Number,
    Sites,
    as_listed,
    differing,
    in_fp32,
    is_recomputing,
    of_rounded_inputs,
    taken,
    taken_again,
    widened,
)
from hmpx.insight.comparing.listed_pass import ListedPass, NumberedPass, all_finite
from hmpx.insight.comparing.noise import Distance, in_full, product, square_of
from hmpx.insight.tensors import Tensor, floating
from hmpx.ops.wrapping.observing import Seen, unobserved


class Fp32Pass(NumberedPass):
    """Computes every call in FP32. A call that drew random numbers under the lists draws the same again."""

    def around(self, asked: Asked) -> Seen:
        with unobserved():
            again = is_recomputing()
            number = self._number(asked, again)
            kept = asked.site.calls.get(number)
            if kept is not None:
                _draw_again(kept)
            return asked.answer(self._result(asked, kept, number, again))

    def _result(self, asked: Asked, kept: Call | None, number: Number, again: bool) -> Any:
        """Compute a call. kept: the same call under the lists. again: whether a checkpoint repeats it."""
        return in_fp32(asked)


class AdvisedPass(ListedPass):
    """Runs some sites in FP32, and all others as the lists say."""

    def __init__(self, sites: Sites, wide: Collection[CallSite]) -> None:
        super().__init__(sites)
        self._wide = wide

    def around(self, asked: Asked) -> Seen:
        again = is_recomputing()
        kept = asked.site.calls.get(self._number(asked, again))
        if kept is not None:
            _draw_again(kept)
        if asked.site not in self._wide:
            return self._plainly(asked)
        with unobserved():
            return asked.answer(in_fp32(asked))


class ComparingPass(Fp32Pass):
    """Compares each call with the same under the lists."""

    def _result(self, asked: Asked, kept: Call | None, number: Number, again: bool) -> Any:
        site = asked.site
        beside = self._beside(asked, kept) if kept is not None and kept.is_low else None
        result = self._exact(asked, kept, number)
        if kept is None:
            return result
        results = floating((result,))
        with torch.no_grad():
            wholes = [square_of(in_full(each)) for each in results] if kept.results else []
            if not again:
                self._accumulate(site, kept, results, wholes)
            deltas = None if beside is None else self._measure(site, beside, results, wholes, again)
        if deltas is not None:
            site.deltas[number] = deltas
            _score_in_backward(site.loss_change, asked, results, deltas)
            if again and torch.is_grad_enabled():
                site.differentiable = True  # a checkpoint runs twice, first without gradients
            elif not any(each.requires_grad for each in results):
                site.differentiable = False
        return result

    @staticmethod
    def _exact(asked: Asked, kept: Call | None, number: Number) -> Any:
        """Compute a call in FP32; keep its decisions for `ShiftedPass`, and count those that the lists change."""
        result, site = in_fp32(asked), asked.site
        inside_func = torch._C._functorch.peek_interpreter_stack() is not None
        made = None if inside_func else taken(asked, result)
        if made is not None:
            again = number in site.decisions
            site.decisions[number] = made
            if kept is not None and kept.decisions and not again:
                changed = differing(made.values, kept.decisions)
                site.decided += sum(value.numel() for value in made.values)
                site.otherwise += changed
                if changed:
                    site.changed_at.append((number[0], kept.order))
        return result

    @staticmethod
    def _beside(asked: Asked, kept: Call) -> tuple[list[Tensor], list[Tensor] | None] | None:
        """Return the results of the op alone under the lists, and the exact ones; None for the FP32 results.

        An op that a list names is charged with all that it makes of FP32 inputs. An op that follows its inputs is not
        charged with their rounding: that belongs to the op that made them.
        """
        with torch.no_grad():
            low = as_listed(asked, kept)
            if low is None:
                return None
            _draw_again(kept)
            exact = floating((of_rounded_inputs(asked, kept),)) if kept.follows else None
            _draw_again(kept)
            return floating((low,)), exact

    @staticmethod
    def _measure(
        site: CallSite,
        beside: tuple[list[Tensor], list[Tensor] | None],
        results: list[Tensor],
        wholes: list[float],
        again: bool,
    ) -> list[Tensor | None]:
        """Return the errors of the results; None for a result without an error, as of `relu`."""
        low, exact = beside
        difference = Distance() if again else site.alone
        deltas: list[Tensor | None] = []
        for a, b, whole in zip(low, exact or results, [None] * len(low) if exact else wholes, strict=False):
            if a.shape != b.shape:
                site.not_compared = "its result has another shape in FP32"
                return []
            before = difference.error
            delta = difference.add(a, b, whole)
            deltas.append(delta if difference.error > before else None)
        return deltas

    def _accumulate(self, site: CallSite, kept: Call, results: list[Tensor], wholes: list[float]) -> None:
        for low, exact, whole in zip(kept.results, results, wholes, strict=False):
            before = site.accumulated.nonfinite
            if low.shape == exact.shape:
                site.accumulated.add(low, exact, whole)
            if site.accumulated.nonfinite > before:
                site.first_wrong = site.first_wrong or (self._sites.batch, kept.order)
                wrong = ~torch.isfinite(low) & torch.isfinite(exact)
                site.largest = max(site.largest, float(exact.detach()[wrong].abs().max()))


class ShiftedPass(Fp32Pass):
    """Runs at shifted weights, with the errors and the decisions that `ComparingPass` has found."""

    def _result(self, asked: Asked, kept: Call | None, number: Number, again: bool) -> Any:
        site = asked.site
        result = taken_again(asked.args, in_fp32(asked), site.decisions.get(number))
        _score_in_backward(site.shifted, asked, floating((result,)), site.deltas.get(number, []))
        return result


class AlonePass(Fp32Pass):
    """Runs some sites as the lists say, and all others in FP32."""

    def __init__(self, sites: Sites, chosen: Collection[CallSite]) -> None:
        super().__init__(sites)
        self._chosen = chosen

    def _result(self, asked: Asked, kept: Call | None, number: Number, again: bool) -> Any:
        if kept is None or not kept.is_low or asked.site not in self._chosen:
            return in_fp32(asked)
        low = as_listed(asked, kept)
        if low is None:
            return in_fp32(asked)
        overflows = not asked.site.accumulated.nonfinite and not all_finite(floating((low,)))
        if overflows and all_finite(floating((_apart(asked),))):
            # A constant that a program takes from the dtype, as for masks, is that of FP32 here.
            asked.site.not_compared = "from what FP32 hands it, it overflows, and under the lists it does not"
            return in_fp32(asked)
        low = widened(low)
        if kept.follows:  # it has its own error alone, not that of rounding its inputs
            _draw_again(kept)
            rounded = of_rounded_inputs(asked, kept)
            _draw_again(kept)
            low = tree_map(_added, low, rounded, _apart(asked))
        return asked.args[0].copy_(low) if asked.point.in_place else low


def _apart(asked: Asked) -> Any:
    """Compute a call in FP32; one that writes to its first input writes to a copy."""
    args = (asked.args[0].clone(), *asked.args[1:]) if asked.point.in_place else asked.args
    return in_fp32(asked.with_arguments(args, asked.kwargs))


def _added(low: Any, rounded: Any, exact: Any) -> Any:
    """Return exact + (low - rounded) where these are numbers."""
    if not isinstance(low, Tensor) or not low.dtype.is_floating_point or low.shape != exact.shape:
        return exact if isinstance(low, Tensor) else low
    error = low - rounded
    return torch.where(torch.isfinite(error.detach()), exact + error, low)


def _score_in_backward(scores: list[float], asked: Asked, results: list[Tensor], deltas: list[Tensor | None]) -> None:
    """Let the backward pass add up the first-order change of the loss by errors in the results of a call."""
    for result, delta in zip(results, deltas, strict=False):
        handed_on = not asked.point.in_place and any(result is arg for arg in asked.args)
        if delta is not None and result.requires_grad and not handed_on and delta.shape == result.shape:
            result.register_hook(functools.partial(_score, scores, delta))


def _score(scores: list[float], delta: Tensor, gradient: Tensor) -> None:
    scores[-1] += product(gradient, delta)


def _draw_again(kept: Call) -> None:
    if kept.drawn is not None:
        run_state.set_state(kept.drawn)
