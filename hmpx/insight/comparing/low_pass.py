"""The run under the lists, which the others are compared with."""

from __future__ import annotations

from collections import Counter

import torch

from hmpx.conversion import installed
from hmpx.insight import generators
from hmpx.insight.comparing.calls import Asked, Call, Number
from hmpx.insight.comparing.computing import in_fp32
from hmpx.insight.comparing.decisions import decisions_in
from hmpx.insight.comparing.sites import Sites
from hmpx.insight.reasons import in_a_line, reason_of_call
from hmpx.insight.tensors import LOW, Tensor, floating, name
from hmpx.ops.wrapping.observing import Seen, unobserved
from hmpx.ops.wrapping.rules import TARGETS

_equal = torch.equal


class Low:
    """Everything as the lists say. What each call saw, and what came out, is kept for `Wide`.

    An op that raises so, and does not in FP32, runs in FP32.
    """

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._order = 0
        self._numbers: Counter[tuple[int, bool]] = Counter()
        self._held: dict[int, list[Call]] = {}  # by the memory that their results are in

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():
            return self.plainly(asked)
        if asked.point.in_place:
            self._keep_what_is_overwritten(asked.args)
        before = generators.get_state()
        seen = self.plainly(asked)
        with unobserved():
            self._keep(asked, seen, None if _equal(before, generators.get_state()) else before)
        return seen

    def plainly(self, asked: Asked) -> Seen:
        """As the lists say, if that can be."""
        try:
            return asked.plainly()
        except Exception as error:
            if is_recomputing() and not asked.site.raised:  # a checkpoint that has what it wants says so by an error
                raise
            with unobserved():
                try:
                    seen = asked.answer(in_fp32(asked))
                except Exception:  # it is not the lists that make it raise
                    raise error from None
                if not asked.site.raised:
                    self._describe_raised(asked, seen, error)
            return seen

    def _describe_raised(self, asked: Asked, seen: Seen, error: Exception) -> None:
        site, conversion = asked.site, installed()
        site.raised, site.rule = in_a_line(error), str(asked.point.rule or "")
        site.dtypes = " and ".join(dict.fromkeys(name(each.dtype) for each in floating((asked.args, asked.kwargs))))
        if conversion is not None:
            site.reason = reason_of_call(asked.point, seen._replace(casting=True), conversion.policy_here)
        if asked.point.rule not in TARGETS:
            memories = {_memory(each) for each in floating((asked.args, asked.kwargs)) if each.dtype in LOW}
            made = [kept for memory in memories for kept in self._held.get(memory, ())]
            makers = [each for each in self._sites.compared() if any(kept in each.calls.values() for kept in made)]
            if makers:
                maker = max(makers, key=lambda each: max(call.order for call in each.calls.values()))
                site.reason += f"; its input is that of {maker.op} at {maker.where} ({maker.reason})"

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
            decisions=[] if transformed else decisions_in(asked.point.op, asked.args, asked.kwargs, seen.result),
        )
        kept.is_low = kept.is_low and not transformed and not asked.site.raised
        self._order += 1
        for result in results:
            self._held.setdefault(_memory(result), []).append(kept)
        if not asked.site.calls and not asked.site.raised:
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


def _describe(asked: Asked, seen: Seen, kept: Call) -> None:
    """Say of a site by which rule it runs, and in which dtypes."""
    conversion, site = installed(), asked.site
    steps = [kept.given, kept.dtypes, [result.dtype for result in kept.results]]
    words = [" and ".join(dict.fromkeys(map(name, step))) for step in steps]
    site.dtypes = " -> ".join(word for i, word in enumerate(words) if word and (i == 0 or word != words[i - 1]))
    site.rule = str(asked.point.rule) if asked.point.rule is not None and seen.casting else ""
    site.reason = reason_of_call(asked.point, seen, conversion.policy_here) if conversion else ""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_recomputing() -> bool:
    """Whether a backward pass is running: what is called there, a checkpoint has called before."""
    return torch._C._current_graph_task_id() != -1
