"""The runs that are compared. Each says in which precision every call of an op is computed.

`Low` is the run under the lists. `Wide` is the same in FP32; beside each call it computes what the op alone makes of
its FP32 inputs under the lists, and asks the backward pass what that error does to the loss. `Shifted` asks that again,
with weights that are shifted a little. In `Alone` some sites run under the lists and all others in FP32; in `Mended`
it is the other way round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch

from hmpx.conversion import installed
from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked, Call, Compared, Number
from hmpx.insight.comparing.computing import as_listed, in_fp32, of_rounded_inputs, widened
from hmpx.insight.comparing.difference import Difference, in_full, square
from hmpx.insight.comparing.scores import furthest, score_in_backward
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.reasons import reason_of_call
from hmpx.insight.tensors import LOW, Tensor, floating, name
from hmpx.ops.observing import Seen, unobserved
from hmpx.ops.rules import TARGETS

_equal = torch.equal


class Low:
    """Everything as the lists say. What each call saw, and what came out, is kept for `Wide`."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._order = 0
        self._numbers: Counter[tuple[int, bool]] = Counter()
        self._held: dict[int, list[Call]] = {}  # by the memory that their results are in

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():
            return asked.plainly()
        if asked.point.in_place:
            self._keep_what_is_overwritten(asked.args)
        before = generators.get_state()
        seen = asked.plainly()
        with unobserved():
            self._keep(asked, seen, None if _equal(before, generators.get_state()) else before)
        return seen

    def _keep(self, asked: Asked, seen: Seen, drawn: Tensor | None) -> None:
        results, given = floating((seen.result,)), floating((asked.args, asked.kwargs))
        if not results and not given:
            return
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if transformed:
            asked.site.not_compared, results = "inside torch.func a tensor stands for several", []
        kept = Call(
            given=tuple([tensor.dtype for tensor in given]),
            dtypes=tuple([tensor.dtype for tensor in floating((seen.args, seen.kwargs))]),
            casting=seen.casting,
            follows=not seen.casting or asked.point.rule not in TARGETS,
            drawn=drawn,
            results=[result.detach() for result in results],
            order=self._order,
        )
        kept.is_low = kept.is_low and not transformed
        self._order += 1
        for result in results:
            self._held.setdefault(_memory(result), []).append(kept)
        if not asked.site.calls:
            _describe(asked, seen, kept)
        asked.site.calls[self._number(asked)] = kept

    def _number(self, asked: Asked, again: bool = False) -> Number:
        """Which call of its site this is in this run; those that a checkpoint makes again are counted on their own."""
        key = id(asked.site), again
        self._numbers[key] += 1
        return self._sites.batch, self._numbers[key] - 1

    def _keep_what_is_overwritten(self, args: tuple) -> None:
        with unobserved():
            for tensor in floating(args[:1]):
                memory = _memory(tensor)
                for kept in self._held.pop(memory, ()):
                    kept.results = [each.clone() if _memory(each) == memory else each for each in kept.results]


class Mended(Low):
    """Everything as the lists say, but some sites in FP32."""

    def __init__(self, sites: Sites, chosen: Collection[Compared]) -> None:
        super().__init__(sites)
        self._chosen = chosen

    def around(self, asked: Asked) -> Seen:
        if asked.site not in self._chosen or asked.point.in_place:
            return asked.plainly()
        with unobserved():
            return asked.answer(in_fp32(asked))


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
                return asked.answer(in_fp32(asked))
            _draw_again(kept)
            return asked.answer(self._result(asked, kept, number, again))

    def _result(self, asked: Asked, kept: Call, number: Number, again: bool) -> Any:
        if not self._compare:
            return in_fp32(asked)
        beside = self._beside(asked, kept) if kept.is_low else None
        result = in_fp32(asked)
        results = floating((result,))
        with torch.no_grad():
            wholes = [square(in_full(each)) for each in results] if kept.results else []
            if not again:
                self._accumulate(asked.site, kept, results, wholes)
            deltas = None if beside is None else self._measure(asked, kept, beside, results, wholes, again)
        if deltas is not None:
            asked.site.deltas[number] = deltas
            score_in_backward(asked.site.loss_change, asked, results, deltas)
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
        kept: Call,
        beside: tuple[list[Tensor], list[Tensor] | None],
        results: list[Tensor],
        wholes: list[float],
        again: bool,
    ) -> list[Tensor | None]:
        """The errors of the results; None where there is none, for `relu` say."""
        low, exact = beside
        difference = Difference() if again else asked.site.alone
        unit = None
        if self._sites.batch == 0:  # of one batch, for it takes as long as all the rest
            unit = next((dtype for dtype in (*(each.dtype for each in low), *kept.dtypes) if dtype in LOW), None)
        deltas: list[Tensor | None] = []
        for a, b, whole in zip(low, exact or results, [None] * len(low) if exact else wholes, strict=False):
            before = difference.error
            delta = difference.add(a, b, whole)
            difference.note_largest(delta, b, unit)
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
    """Everything in FP32, at shifted weights; the errors are those that `Wide` has found."""

    def __init__(self, sites: Sites) -> None:
        super().__init__(sites)
        self._scored: list[Tensor] = []
        self._written = False  # whether a result may have been written to afterwards

    def wanted(self) -> list[Tensor] | None:
        """Tensors down to which the gradients are looked at, so that none need be computed for weights; None for all.

        Of a tensor that was written to since, autograd would give another gradient.
        """
        return None if self._written else furthest(self._scored)

    def _result(self, asked: Asked, kept: Call, number: Number, again: bool) -> Any:
        result = in_fp32(asked)
        self._written = self._written or asked.point.in_place
        deltas = asked.site.deltas.get(number, [])
        self._scored += score_in_backward(asked.site.shifted, asked, floating((result,)), deltas)
        return result


class Alone(Wide):
    """Everything in FP32, but some sites as the lists say."""

    def __init__(self, sites: Sites, chosen: Collection[Compared]) -> None:
        super().__init__(sites)
        self._chosen = chosen

    def _result(self, asked: Asked, kept: Call, number: Number, again: bool) -> Any:
        low = as_listed(asked, kept) if asked.site in self._chosen else None
        if low is None:
            return in_fp32(asked)
        return asked.args[0].copy_(low) if asked.point.in_place else widened(low)


def _describe(asked: Asked, seen: Seen, kept: Call) -> None:
    """Say of a site by which rule it runs, and in which dtypes."""
    conversion, site = installed(), asked.site
    steps = [kept.given, kept.dtypes, [result.dtype for result in kept.results]]
    words = [" and ".join(dict.fromkeys(map(name, step))) for step in steps]
    site.dtypes = " -> ".join(word for i, word in enumerate(words) if word and (i == 0 or word != words[i - 1]))
    site.rule = str(asked.point.rule) if asked.point.rule is not None and seen.casting else ""
    site.reason = reason_of_call(asked.point, seen, conversion.policy_here) if conversion else ""


def _draw_again(kept: Call) -> None:
    if kept.drawn is not None:
        generators.set_state(kept.drawn)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_recomputing() -> bool:
    """Whether a backward pass is running: what is called there, a checkpoint has called before."""
    return torch._C._current_graph_task_id() != -1
