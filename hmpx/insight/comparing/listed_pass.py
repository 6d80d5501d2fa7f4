"""The pass under the lists, and the search for the first op that makes inf or NaN in any pass."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from hmpx.conversion import installed
from hmpx.insight import run_state
from hmpx.insight.comparing.calls import (
    Asked,
    Call,
    CallSite,
    Number,
    Pass,
    Sites,
    decisions_in,
    in_fp32,
    is_recomputing,
)
from hmpx.insight.reasons import in_a_line, reason_of_call
from hmpx.insight.tensors import LOW, Tensor, floating, is_masked, name
from hmpx.insight.text_table import dtype_steps
from hmpx.ops.wrapping.observing import Seen, unobserved
from hmpx.ops.wrapping.rules import TARGETS

_equal = torch.equal


class NumberedPass:
    """A pass that counts the calls of each site, so that each call is found again in another pass."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites
        self._numbers: Counter[tuple[int, bool]] = Counter()

    def _number(self, asked: Asked, again: bool = False) -> Number:
        """Return the number of a call; calls that a checkpoint repeats are counted on their own."""
        key = id(asked.site), again
        self._numbers[key] += 1
        return self._sites.batch, self._numbers[key] - 1


class ListedPass(NumberedPass):
    """Runs every call as the lists say, and keeps a `Call` of each for the FP32 passes.

    An op that raises under the lists, and does not in FP32, runs in FP32.
    """

    def __init__(self, sites: Sites) -> None:
        super().__init__(sites)
        self._order = 0
        self._held: dict[int, list[Call]] = {}  # by the memory that their results are in

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():
            return self._plainly(asked)
        if asked.point.in_place:
            self._keep_what_is_overwritten(asked.args)
        before = run_state.get_state()
        seen = self._plainly(asked)
        with unobserved():
            self._keep(asked, seen, None if _equal(before, run_state.get_state()) else before)
        return seen

    def _plainly(self, asked: Asked) -> Seen:
        """Run a call as the lists say, or in FP32 if it raises under the lists alone."""
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
        site, conversion, given = asked.site, installed(), floating((asked.args, asked.kwargs))
        site.raised, site.rule = in_a_line(error), str(asked.point.rule or "")
        site.dtypes = " and ".join(dict.fromkeys(name(each.dtype) for each in given))
        if conversion is not None:
            site.reason = reason_of_call(asked.point, seen._replace(casting=True), conversion.policy_here)
        if asked.point.rule not in TARGETS:  # its input decides its dtype: name the op that made that
            made = [kept for each in given if each.dtype in LOW for kept in self._held.get(_memory(each), ())]
            calls = [(kept.order, at) for at in self._sites.compared() for kept in at.calls.values() if kept in made]
            if calls:
                maker = max(calls, key=lambda each: each[0])[1]
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

    def _keep_what_is_overwritten(self, args: tuple) -> None:
        """Copy the kept results in the memory that a call is about to write to."""
        with unobserved():
            for tensor in floating(args[:1]):
                memory = _memory(tensor)
                for kept in self._held.pop(memory, ()):
                    kept.results = [each.clone() if _memory(each) == memory else each for each in kept.results]


def _describe(asked: Asked, seen: Seen, kept: Call) -> None:
    """Note by which rule a site runs, and in which dtypes."""
    conversion, site = installed(), asked.site
    steps = kept.given, kept.dtypes, [result.dtype for result in kept.results]
    site.dtypes = dtype_steps(*(map(name, step) for step in steps))
    site.rule = str(asked.point.rule) if asked.point.rule is not None and seen.casting else ""
    site.reason = reason_of_call(asked.point, seen, conversion.policy_here) if conversion else ""


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class FirstNonfinite:
    """Wraps another pass, and finds the first site that makes inf or NaN of finite numbers.

    forward: the first site that does so in the forward pass, not counting the -inf of a mask. backward: the site of the
    first node of autograd's graph that turns finite gradients into inf or NaN. The nodes of a call are those between
    its results and its inputs.
    """

    def __init__(self, inner: Pass) -> None:
        self._inner = inner
        self.forward: CallSite | None = None
        self.backward: CallSite | None = None
        self._known: dict[Any, None] = {}  # nodes that have an owner; kept alive, so that none takes another's place

    def around(self, asked: Asked) -> Seen:
        if is_recomputing():
            return self._inner.around(asked)
        with unobserved():
            inputs = floating((asked.args, asked.kwargs))
            nodes, looks = [tensor.grad_fn for tensor in inputs], self.forward is None and all_finite(inputs)
        seen = self._inner.around(asked)
        with unobserved():
            results = floating((seen.result,))
            odd = next((each for each in results if not all_finite([each])), None) if looks else None
            if odd is not None and not is_masked(asked.point.op, inputs, odd):
                self.forward = asked.site
            self._known |= dict.fromkeys(nodes)
            self._watch(asked.site, [result.grad_fn for result in results])
        return seen

    def _watch(self, site: CallSite, nodes: list[Any]) -> None:
        while nodes:
            node = nodes.pop()
            if node is None or node in self._known or hasattr(node, "variable"):  # a leaf's
                continue
            self._known[node] = None
            node.register_hook(functools.partial(self._look, site))
            nodes += [following for following, _ in node.next_functions]

    def _look(self, site: CallSite, into: Sequence[Tensor | None], out: Sequence[Tensor | None]) -> None:
        with unobserved():
            if self.backward is None and all_finite(out) and not all_finite(into):
                self.backward = site


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all elements of all tensors are finite."""
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors if tensor is not None)
