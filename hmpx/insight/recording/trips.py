"""Round trips: tensors that one op casts, and another casts back."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from hmpx.insight.recording.site import RoundTrip, Site
from hmpx.insight.tensors import Tensor, name
from hmpx.ops.policies import op_facts

_LATEST = 1024  # how many tensors are remembered by what was done to them
_LISTED = ("bf16", "fp16", "fp32", "promote")


class _Changed(NamedTuple):
    """A tensor whose dtype differs from the tensor it continues, and the site that cast it."""

    tensor: weakref.ref
    site: Site
    before: torch.dtype
    after: torch.dtype


class RoundTrips:
    """Follows tensors from op to op, and notes in `found` those that are cast there and back.

    What the caller asks for at both ends, by a cast by hand or by ``dtype=``, is a decision and no finding.
    """

    def __init__(self, found: list[RoundTrip]) -> None:
        self._found = found
        self._known: dict[tuple[int, int], RoundTrip] = {}
        self._changed: dict[int, _Changed] = {}  # by the identity of the tensor

    def follow(self, site: Site, given: list[Tensor], inside: list[Tensor], result: list[Tensor]) -> None:
        """One call: what came in, the same as the op ran on it, and what came out."""
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
            self._remember(_Changed(weakref.ref(result[0]), site, before, result[0].dtype))
        elif len(given) == 1 and given[0].dtype is result[0].dtype and given[0].numel() == result[0].numel():
            made = self._of(given[0])  # by way of an op such as dropout, which leaves the dtype alone
            if made is not None:
                self._remember(made._replace(tensor=weakref.ref(result[0])))

    def _of(self, tensor: Tensor) -> _Changed | None:
        """How a tensor, or the base of a view, came to its dtype."""
        made = self._changed.get(id(tensor)) or self._changed.get(id(tensor._base))
        return made if made is not None and made.tensor() is not None else None

    def _remember(self, made: _Changed) -> None:
        if len(self._changed) >= _LATEST:
            alive = {key: each for key, each in self._changed.items() if each.tensor() is not None}
            self._changed = alive if len(alive) < _LATEST // 2 else {}
        self._changed[id(made.tensor())] = made

    def _note(self, made: _Changed, site: Site, tensor: Tensor) -> None:
        first = made.site
        if _by_hand(first) and _by_hand(site):
            return
        key = id(first), id(site)
        if key not in self._known:
            listed = first.rule in _LISTED and site.rule in _LISTED
            dtypes = name(made.before), name(made.after), name(made.before)
            self._known[key] = RoundTrip(first.where, site.where, (first.op, site.op), dtypes, listed=listed)
            self._found.append(self._known[key])
        trip = self._known[key]
        trip.calls += 1
        trip.bytes += tensor.numel() * (tensor.element_size() + made.before.itemsize)


def _by_hand(site: Site) -> bool:
    return site.op == "to" or "the caller says" in site.reason


def _continued(given: list[Tensor], result: Tensor) -> torch.dtype | None:
    """The dtype of the inputs that a result continues in another one; None where it keeps the dtype of one.

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
