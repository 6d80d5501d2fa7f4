"""What the lists do at each call site of a batch, beside FP32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.conversion import installed
from hmpx.insight.reasons import reason_of_call
from hmpx.insight.report import dtype_steps
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.insight.trials.calls import (
    Asked,
    CallSite,
    as_listed,
    decisions_in,
    differing,
    exactly,
    is_transformed,
)
from hmpx.insight.trials.runs import dtypes
from hmpx.ops.wrapping.observing import Seen, unobserved
from hmpx.ops.wrapping.rules import TARGETS


class Exact(NamedTuple):
    """What is kept of a call in FP32: whether its result is finite, its largest magnitude, its decisions."""

    is_finite: bool
    largest: float
    decisions: list[Tensor]


class BothWays:
    """Computes the calls of a batch in FP32 (`exact`), then under the lists (`listed`), and tells their sites."""

    def __init__(self) -> None:
        self._exact: dict[tuple, Exact] = {}  # by site and number
        self._made: dict[int, CallSite] = {}  # by memory, the site that made what is in it last
        self._order = 0

    def exact(self, asked: Asked) -> Seen:
        """Compute a call in FP32."""
        seen = exactly(asked)
        if asked.number is not None:
            with unobserved():
                results = _readable(seen.result)
                largest = max((float(each.abs().max()) for each in results), default=0.0)
                self._exact[asked.site, asked.number] = Exact(
                    all_finite(results), largest, decisions_in(asked, seen.result)
                )
        return seen

    def listed(self, asked: Asked) -> Seen:
        """Compute a call as the lists say, or in FP32 where it raises."""
        raised = asked.site.raised
        seen = as_listed(asked)
        if asked.number is not None:
            with unobserved():
                if asked.site.raised and not raised:
                    self._name_the_maker(asked)
                self._note(asked, seen)
        return seen

    def _note(self, asked: Asked, seen: Seen) -> None:
        site, (batch, _) = asked.site, asked.number or (0, 0)
        given, saw, results = (floating(each) for each in ((asked.args, asked.kwargs), seen[:2], (seen.result,)))
        if not given and not results:
            return
        self._order += 1
        site.calls += 1
        site.saw[asked.number or (0, 0)] = tuple(tensor.dtype for tensor in saw)
        # An op that torch promotes, or a cast by hand to FP32, gets inputs in low precision and computes in FP32.
        follows = not seen.casting or asked.point.rule not in TARGETS
        is_low = bool(dtypes(results) & LOW) or (not follows and bool(dtypes(saw) & LOW))
        site.is_low = (site.is_low or is_low) and not site.raised
        if not site.dtypes:
            site.dtypes = dtype_steps(
                *([dtype_name(tensor.dtype) for tensor in step] for step in (given, saw, results))
            )
            site.rule = str(asked.point.rule) if asked.point.rule is not None and seen.casting else ""
            if not site.reason and (conversion := installed()) is not None:
                site.reason = reason_of_call(asked.point, seen, conversion.policy_here)
        exact = self._exact.get((site, asked.number))
        if exact is not None:
            if exact.is_finite and site.wrong is None and not all_finite(_readable(seen.result)):
                site.wrong, site.largest = (batch, self._order), exact.largest
            site.decided += sum(each.numel() for each in exact.decisions)
            site.changed += differing(exact.decisions, decisions_in(asked, seen.result))
        if not is_transformed():
            self._made |= dict.fromkeys((tensor.untyped_storage().data_ptr() for tensor in results), site)

    def _name_the_maker(self, asked: Asked) -> None:
        """Add to the reason of a site that raises, and whose inputs decide its dtype, which op has made them."""
        if asked.point.rule in TARGETS or is_transformed():
            return
        low = [tensor for tensor in floating((asked.args, asked.kwargs)) if tensor.dtype in LOW]
        maker = next((self._made.get(tensor.untyped_storage().data_ptr()) for tensor in low), None)
        if maker is not None:
            asked.site.reason += f"; its input is that of {maker.op} at {maker.where} ({maker.reason})"


def _readable(result: object) -> list[Tensor]:
    """Return the floating tensors of a result; none inside torch.func, where a tensor stands for several."""
    if is_transformed():
        return []
    return [tensor.detach() for tensor in floating((result,)) if tensor.numel() and tensor.layout is torch.strided]


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Whether all elements of all tensors are finite."""
    return all(bool(torch.isfinite(tensor.detach()).all()) for tensor in tensors if tensor is not None)
