"""Listed ops that run without a wrapper.

Listed ops that other ops call in C++, `torch.ops.aten`, scripted modules and captured names that could not be changed
pass no wrapper. They do pass torch's dispatcher, as every aten op does with its tensors.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from hmpx.base import process_state, region_state
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import autograd_node, private, tree_leaves
from hmpx.conversion import Conversion
from hmpx.insight.dispatch import Look
from hmpx.ops.policies.catalog import Op, canonical, catalog
from hmpx.ops.policies.composition import callers
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.callers import frames, rule_of, users_line
from hmpx.ops.wrapping.overriding import is_computing
from hmpx.ops.wrapping.rules import TARGETS, eligible_dtypes

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
        if len(wrong) < len(rules):
            return  # right for at least one of the ops that may have called it
        caller = sys._getframe(3)
        if any(map(is_computing, frames(caller))):
            return  # FP32 kernels compute an op whose inputs and results are in low precision
        deciding = (rule_of(frame) for frame in frames(caller))
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
