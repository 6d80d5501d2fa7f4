"""Builds the wrappers of torch's functions: one for each function, from the rules of its op in each scope."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from hmpx.ops.computing.kernels import Kernels
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import Entry, catalog
from hmpx.ops.policies.op_lists import is_shipped
from hmpx.ops.policies.policy import Case, Policy, Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.wrapping.codegen import Switch
from hmpx.ops.wrapping.observing import Observer
from hmpx.ops.wrapping.patches import Patch, Patching, made_patch, read_attribute
from hmpx.ops.wrapping.wrappers import build_choice, build_explaining, build_refusing, build_scoped, build_untouched

Cases = tuple[Case, ...]
Wanted = tuple[str, Entry, Mapping[int, Cases]]  # an op's name, one of its entry points, and what it does in each scope


class Wrappers:
    """The wrappers of one conversion. Further scopes may be added while it is in force."""

    def __init__(self, switch: Switch, kernels: Kernels, observer: Observer | None) -> None:
        self.switch, self._kernels, self._observer = switch, kernels, observer
        self._functions: dict[tuple[int, bool], _Function] = {}  # one object under several names stays one object
        self._standing: dict[tuple[int, str], Patch] = {}
        self._cases = _CasesByOp()
        self._low = False  # whether some op is computed in low precision
        self._asked: set[str] = set()  # unsafe ops that a list of the user's own names

    def patches(self, policies: Mapping[int, Policy]) -> Iterator[Patch]:
        """The patches of functions that have none yet, or that need another wrapper.

        policies: by scope, all that are known.
        """
        self._cases.learn(policies)
        self._low = self._low or any(policy.bf16 or policy.fp8 for policy in policies.values())
        for origins in (policy.origins for policy in policies.values()):
            self._asked |= {op for op in op_facts.UNSAFE_OF_LOW if op in origins and not is_shipped(origins[op])}
        wanted = self._cases.wanted(self._low)
        if self._observer is not None and self._observer.everything:
            wanted = _with_the_others(wanted)
        for op, entry, cases in wanted:
            key = id(entry.owner), entry.attribute
            old = self._standing.get(key)
            if old is None:
                original, inherited = read_attribute(entry.owner, entry.attribute)
            else:
                original, inherited = old.original, old.inherited
            function = self._functions.get((id(original), entry.in_place))
            if function is None:
                function = self._functions[id(original), entry.in_place] = _Function(op, entry, original, self._build)
            wrapper = function.wrapper(cases)
            if old is None or old.wrapper is not wrapper:
                rule = next((case.rule for each in cases.values() for case in each if case.rule is not None), None)
                uncast = Patching.EXPLAINED if self._observer is None else Patching.OBSERVED
                how = uncast if rule is None else Patching.CAST
                before = None if old is None else old.wrapper
                patch = made_patch(op, how, rule, entry, original, wrapper, inherited, before)
                self._standing[key] = patch
                yield patch

    def _build(self, op: str, entry: Entry, original: Callable, cases: Cases) -> Callable:
        def running(case: Case) -> Callable:
            kernel = self._kernels.kernel(op, case)
            return original if kernel is None else kernel.wrap(op, original)

        built = build_choice(op, entry, cases, original, self.switch, running, self._observer)
        if self._low and _may_refuse_low(op, cases):
            return build_explaining(op, entry, original, built)
        instead = op_facts.UNSAFE_OF_LOW.get(op)
        if instead is None or not self._low or built is original:
            return built
        return build_refusing(op, entry, original, built, self.switch, instead, op in self._asked)


class _Function:
    """One function of torch and its wrapper."""

    def __init__(self, op: str, entry: Entry, original: Callable, build: Callable[..., Callable]) -> None:
        self._op, self._entry, self._original, self._build = op, entry, original, build
        self._built: dict[Cases, Callable] = {}
        self._runs: dict[int, Callable] = {}  # by scope; the scoped wrapper looks here
        self._scoped: Callable | None = None

    def wrapper(self, cases: Mapping[int, Cases]) -> Callable:
        """A wrapper of one rule if all scopes agree; else one that asks for the scope in each call."""
        for scope, each in itertools.islice(cases.items(), len(self._runs), None):  # in the order of before
            if each not in self._built:
                built = self._build(self._op, self._entry, self._original, each)
                self._built[each] = build_untouched(built) if built is self._original else built
            self._runs[scope] = self._built[each]
        if self._scoped is None and len(self._built) > 1:
            self._scoped = build_scoped(self._entry, self._original, self._runs)
        return self._runs[0] if self._scoped is None else self._scoped


class _CasesByOp:
    """The rules of each op in the known scopes. A new scope adds to them without new work for the others."""

    def __init__(self) -> None:
        self._first: dict[Policy, int] = {}  # the first scope of each: many scopes have one policy
        self._scopes: set[int] = set()
        self._of: dict[str, dict[int, Cases]] = {name: {} for name in catalog()}
        self._ruled: set[str] = set()  # ops that some rule concerns in some scope

    def learn(self, policies: Mapping[int, Policy]) -> None:
        """Work out the scopes that are not known yet."""
        for scope, policy in policies.items():
            if scope in self._scopes:
                continue
            self._scopes.add(scope)
            like = self._first.setdefault(policy, scope)
            for name, op in catalog().items():
                cases = policy.cases(op) if like == scope else self._of[name][like]
                self._of[name][scope] = cases
                if any(case.rule is not None for case in cases):
                    self._ruled.add(name)

    def wanted(self, low: bool) -> Iterator[Wanted]:
        """Every entry point that some rule needs, with its cases; where ops run in `low` precision, what refuses it."""
        for name, op in catalog().items():
            explained = low and not op.view and _may_refuse_low(name, ())
            for entry in op.entries:
                if entry.in_place:
                    # torch's in-place ops keep the first tensor and convert the others; only where it refuses is there
                    # something to do. Its own conversion rounds once where a cast before it would round twice.
                    if op.refuses_mixed:
                        yield name, entry, {0: (Case(Rule.FIRST_INPUT),)}
                elif name in self._ruled or (explained and not entry.signature.python):
                    yield name, entry, self._of[name]


def _may_refuse_low(op: str, cases: Cases) -> bool:
    """Whether torch may refuse a BF16 input of this op, which no list names."""
    named = op in op_facts.NO_LOW_KERNEL or op.startswith(op_facts.NO_LOW_KERNELS)
    return named and all(case.rule in (None, Rule.FIRST_INPUT) for case in cases)


def _with_the_others(wanted: Iterable[Wanted]) -> Iterator[Wanted]:
    """`wanted`, and the ops without a rule.

    Not among them: views, what makes no new values, and Python functions of torch, whose parts are seen.
    """
    found = set()
    for op, entry, cases in wanted:
        found.add((id(entry.owner), entry.attribute))
        yield op, entry, cases
    nothing = {0: (Case(None),)}
    for each in catalog().values():
        if each.computes and not each.view and not each.name.startswith("_"):
            for entry in each.entries:
                if not entry.signature.python and (id(entry.owner), entry.attribute) not in found:
                    yield each.name, entry, nothing
    for method in op_facts.CASTS_BY_HAND:
        yield "to", Entry(torch.Tensor, method, f"Tensor.{method}", Signature()), nothing
