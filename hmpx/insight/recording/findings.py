"""What `record` finds besides its sites: round trips, names that no call matched, and ops that no wrapper reaches."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hmpx.base import process_state, region_state
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import autograd_node, base_of, private, tree_leaves
from hmpx.conversion import Conversion
from hmpx.insight.dispatch import Look
from hmpx.insight.recording.recorded import RoundTrip, Site
from hmpx.insight.tensors import Tensor
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import Op, canonical, catalog
from hmpx.ops.policies.composition import callers
from hmpx.ops.policies.lists import SIDES, shipped
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.callers import frames, rule_of, users_line
from hmpx.ops.wrapping.observing import observed_op
from hmpx.ops.wrapping.overriding import is_computing
from hmpx.ops.wrapping.rules import TARGETS, eligible_dtypes

_LISTED = ("bf16", "fp16", "fp32", "promote")


class _Changed(NamedTuple):
    """How a tensor came to a dtype that differs from the tensor it continues, and the site that cast it."""

    site: Site
    before: torch.dtype
    after: torch.dtype


class RoundTrips:
    """Follows tensors from op to op, and notes in `found` those that are cast there and back.

    Where the caller asks for both casts, by a cast by hand or by ``dtype=``, that is a decision and no finding.
    """

    def __init__(self, found: list[RoundTrip]) -> None:
        self._found = found
        self._known: dict[tuple[int, int], RoundTrip] = {}
        self._changed: dict[int, tuple[_Changed, weakref.ref]] = {}  # by the identity of the tensor, while it lives

    def follow(self, site: Site, given: list[Tensor], inside: list[Tensor], result: list[Tensor]) -> None:
        """Follow one call: the tensors that came in, the same as the op ran on them, and its results."""
        for i, tensor in enumerate(given):
            after = inside[i].dtype if i < len(inside) else tensor.dtype
            if site.op == "to":
                after = result[0].dtype
            if after is not tensor.dtype:
                made = self._of(tensor)
                if made is not None and made.after is tensor.dtype and made.before is after:
                    self._note(made, site, tensor)
        if not given or not result or site.op in op_facts.O2_BF16:  # products, which continue no tensor
            return
        before = _continued(given, result[0])
        if before is not None:
            self._remember(result[0], _Changed(site, before, result[0].dtype))
        elif len(given) == 1 and given[0].dtype is result[0].dtype and given[0].numel() == result[0].numel():
            made = self._of(given[0])  # by way of an op such as dropout, which leaves the dtype alone
            if made is not None:
                self._remember(result[0], made)

    def _of(self, tensor: Tensor) -> _Changed | None:
        """Return how a tensor, or the base of a view, came to its dtype."""
        found = self._changed.get(id(tensor)) or self._changed.get(id(base_of(tensor)))
        return found[0] if found else None

    def _remember(self, tensor: Tensor, made: _Changed) -> None:
        key = id(tensor)
        self._changed[key] = made, weakref.ref(tensor, lambda _: self._changed.pop(key, None))

    def _note(self, made: _Changed, site: Site, tensor: Tensor) -> None:
        first = made.site
        if _by_hand(first) and _by_hand(site):
            return
        key = id(first), id(site)
        if key not in self._known:
            listed = first.rule in _LISTED and site.rule in _LISTED
            dtypes = dtype_name(made.before), dtype_name(made.after), dtype_name(made.before)
            self._known[key] = RoundTrip(first.where, site.where, (first.op, site.op), dtypes, listed=listed)
            self._found.append(self._known[key])
        trip = self._known[key]
        trip.calls += 1
        trip.bytes += tensor.numel() * (tensor.element_size() + made.before.itemsize)


def _by_hand(site: Site) -> bool:
    return site.op == "to" or "the caller says" in site.reason


def _continued(given: list[Tensor], result: Tensor) -> torch.dtype | None:
    """Return the dtype of the inputs that a result continues in another one; None where it keeps the dtype of one.

    A sum in FP32 of an FP32 activation and a BF16 one continues the first. One of a BF16 activation and an FP32
    parameter, or a constant, continues the second in another dtype.
    """
    dtype = None
    for tensor in given:
        if tensor.numel() != result.numel() or isinstance(tensor, torch.nn.Parameter):
            continue
        if tensor.dtype is result.dtype:
            if tensor.grad_fn is not None or not result.requires_grad:
                return None
        else:
            dtype = tensor.dtype
    return dtype


def unmatched(policy: Policy, used: Mapping[int, set[str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names in a user's lists that no call matched, each with its line; and those in the lists of hmpx.

    used: by scope, the ops that were called there and the names that they follow.
    """
    everywhere = _with_followed(set().union(*used.values()))
    unused = [each for side in SIDES for each in getattr(policy, side) if each not in everywhere]
    origins = {each: policy.origins.get(each, "") for each in unused}
    own = [each for each, origin in origins.items() if origin and not origin.startswith(str(shipped()))]
    rules = {rule.overlay.number: rule.overlay for rule in list(process_state.module_rules)}
    of_rules = [line for _, overlay in sorted(rules.items()) for line in _of_overlay(overlay, used)]
    return (
        tuple([*(f"{origins[each]}: {each}" for each in own), *of_rules]),
        tuple(each for each in unused if each not in own),
    )


def _with_followed(names: set[str]) -> set[str]:
    ops = catalog()
    return names | {follows for each in names if each in ops and (follows := ops[each].follows)}


def _of_overlay(overlay: Overlay, used: Mapping[int, set[str]]) -> Iterator[str]:
    """Yield the names that the overlay of a module rule lists and that decided no call; or that it decided none."""
    called: set[str] | None = None
    entered = False
    for scope, names in used.items():
        left, hidden = _with_followed(names), False  # by the overlays further in
        while scope:
            scope, number = process_state.scopes[scope]
            if number == overlay.number:
                entered = True
                called = called if hidden else left | (called or set())
            inner = process_state.overlays[number]
            hidden = hidden or inner.dtype is not None
            left = left - {each for each, _, _ in inner.names}
    if called is None:
        inside = "every op that was called in it was in a module or region with a rule of its own"
        yield f"{overlay.where}: {inside if entered else 'no op was called in it'}"
    else:
        yield from (f"{where}: {each}" for each, _, where in overlay.names if each not in called)


# Listed ops that run without a wrapper: those that other ops call in C++, `torch.ops.aten`, scripted modules and
# captured names that could not be changed. They do pass torch's dispatcher, as every aten op does with its tensors.

_OpOverload = private("torch._ops.OpOverload")


class Escaped(Look):
    """Collects the ops of forward passes that ran in another dtype than the policy says."""

    follows_steps = False

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()
        self._conversion: Conversion | None = None
        # By scope and identity, as operators have a hash in Python: the operator, what may have called it.
        self._known: dict[tuple[int, int], tuple[Any, list[Op], dict[str, Rule]]] = {}

    def called(self, func: Any, args: tuple, kwargs: dict) -> None:
        conversion = process_state.installed.get(Conversion)
        if conversion is not None:
            if conversion is not self._conversion:
                self._conversion, self._known = conversion, {}
            key = region_state.scope(), id(func)
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = (func, *_listed(func, conversion.policy_here))
            # Left out, as no part of the model's forward: backward passes, and regions without casts.
            if known[2] and autograd_node() is None and region_state.casts_on():
                self._look(*known, args, kwargs)

    def _look(self, func: Any, ops: list[Op], rules: dict[str, Rule], args: tuple, kwargs: dict) -> None:
        if kwargs.get("dtype") is not None:
            return
        values = tree_leaves((args, kwargs))
        writes_statistics = any(entry.signature.statistics for op in ops for entry in op.entries)
        dtypes = tuple(dict.fromkeys(eligible_dtypes(values[:1] if writes_statistics else values)))
        wrong = {name: rule for name, rule in rules.items() if any(dtype is not TARGETS[rule] for dtype in dtypes)}
        if len(wrong) < len(rules) or observed_op() in {op.name for op in ops} - rules.keys():
            return  # right for at least one of the ops that may have called it, or for the one that has: in no list
        caller = sys._getframe(3)
        if any(map(is_computing, frames(caller))):
            return  # FP32 kernels compute an op whose inputs and results are in low precision
        deciding = (rule_of(frame.f_code) for frame in frames(caller))
        if any(rule in (*TARGETS, Rule.PROMOTE) for rule in deciding):
            return
        op, rule = next(iter(wrong.items()))
        listed = (where := _listed_at(op, self._conversion)) and f" at {where}"
        ran = f"{op} is in the {rule} list{listed} and ran in {' and '.join(map(dtype_name, dtypes))}"
        self._seen[f"{users_line(caller)}: {ran}", str(func)] += 1

    def sentences(self) -> list[str]:
        """Return a sentence for each line and op, with the operator of torch that ran and how often."""
        return [f"{said} ({aten}{f', {n} times' if n > 1 else ''})" for (said, aten), n in self._seen.items()]


def _listed(func: Any, policy: Policy) -> tuple[list[Op], dict[str, Rule]]:
    """Return the ops that may have been called when an operator runs, and the rules of those that lists name.

    An operator that writes to its arguments has none: the rules leave it alone.
    """
    if not isinstance(func, _OpOverload) or func._schema.is_mutable:
        return [], {}
    ops = _meant(func._schema.name.removeprefix("aten::"), policy)
    return ops, {op.name: rule for op in ops if not op.view and (rule := policy.listed_as(op)) in TARGETS}


def _listed_at(name: str, conversion: Conversion | None) -> str:
    """Return the origin of an op's rule in a module rule or region; "" if the conversion's own lists decide."""
    if conversion is None:
        return ""
    here = conversion.policy_here.origins.get(name, "")
    return "" if here == conversion.policy.origins.get(name, "") else here


def _meant(aten: str, policy: Policy) -> list[Op]:
    """Return the ops that may have been called when aten::`aten` runs; only the op itself if a list names it."""
    ops = catalog()
    own = ops.get(canonical(aten))
    if own is not None and policy.listed_as(own):
        return [own]
    return [ops[name] for name in (canonical(aten), *callers(aten)) if name in ops]
