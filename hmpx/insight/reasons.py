"""Says why an op has its rule, in the words that every view uses."""

from __future__ import annotations

from types import FrameType

import torch

from hmpx.base import region_state
from hmpx.ops.forwards import overlay_that_casts
from hmpx.ops.policies.catalog import Op, catalog
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.observing import Point, Seen
from hmpx.ops.wrapping.rules import is_explicit


def reason(op: Op, policy: Policy) -> str:
    """Return the rule that an op gets under a policy, and where that comes from."""
    if op.view:
        return f"none: only makes a view: never cast{_where(op.name, policy, ', though ')}"
    if policy.listed_as(op) is None and (composed := _reason_of_parts(op, policy)):
        return composed
    listed = policy.listed_as(op)
    where = _where(op.name, policy) or (f"as {op.follows}, {_where(op.follows, policy)}" if op.follows else "")
    if listed is Rule.PROMOTE and not op.refuses_mixed:
        return f"promote: {where}; torch already takes the widest dtype, so nothing is patched"
    if listed is not None:
        return f"{listed}: {where}"
    in_none = policy.origins.get(op.name, "in no list")  # or in one for a newer torch
    if op.promotes:
        return f"promote: {in_none}, and torch refuses mixed dtypes; to round its numbers would go wrong"
    if op.refuses_mixed:
        return f"first input: {in_none}, and torch refuses mixed dtypes, so the others follow the first"
    return f"none: {in_none}; torch's own function, untouched"


def reason_of_call(point: Point, seen: Seen, policy: Policy, frame: FrameType | None = None) -> str:
    """Say why one call, made in `frame`, was cast as it was, or was not."""
    op = catalog().get(point.op)
    if point.op == "to":
        overlay = overlay_that_casts(frame) if frame is not None else None
        return f"cast before the module's forward: {overlay.where}" if overlay else "cast by hand"
    if point.rule is not None and not seen.casting:
        if is_explicit(seen.args, seen.kwargs):
            return "left alone: the caller says dtype= or out="
        island = region_state.innermost()
        where = f"in torch.autocast(enabled=False) at {island.where}" if island.island else "casts are off here"
        return f"left alone: {where}"
    if op is None:
        return f"{point.rule}: {_where(point.op, policy) or 'by its decorator'}; a function of yours"
    if point.in_place:
        return "in place: it keeps its first tensor's dtype"
    return reason(op, policy)


def in_a_line(error: Exception) -> str:
    """Return an error's message in one line; raise an out-of-memory error again, as it is no matter of precision."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        raise error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _where(name: str, policy: Policy, before: str = "") -> str:
    """Return where a name is listed; "" if it is not."""
    if not policy.listed(name):
        return ""
    origin = policy.origins.get(name)
    return before + (f"listed at {origin}" if origin else f"decided by opt_level {policy.opt_level}")


def _reason_of_parts(op: Op, policy: Policy) -> str:
    """Return the reason for an unlisted op: which parts it follows, or why it follows none."""
    if differing := policy.undecided(op):
        parts = ", ".join(f"{name} {rule}" for name, rule in differing.items())
        left = "the others follow the first" if op.refuses_mixed else "torch's own function, untouched"
        aside = "its parts are in different lists"
        if not any(case.follows for case in policy.cases(op)):
            return f"{'first input' if op.refuses_mixed else 'none'}: in no list, and {aside} ({parts}); {left}"
    cases = policy.cases(op)
    followed = [f"{name}, {_where(name, policy)}" for case in cases for name in case.follows]
    if not followed:
        return ""
    somewhere = "" if len(cases) == 1 else ", where its arguments make it run that"
    return f"{policy.rule(op)}: in no list; follows {' and '.join(dict.fromkeys(followed))}{somewhere}"
