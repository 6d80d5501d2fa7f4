"""What `record` finds besides its sites: tensors that are cast there and back, and names that no call matched."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from hmpx.base import process_state
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import base_of
from hmpx.insight.recording.recorded import RoundTrip, Site
from hmpx.insight.tensors import Tensor
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.lists import SIDES, shipped
from hmpx.ops.policies.policy import Policy

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
