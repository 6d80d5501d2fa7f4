"""Everything that policies change in torch: wrappers, captured names, and compilers that look names up.

`PatchTable` works out the wrappers without touching torch: one for each function, from the rules of its op in each
scope. `Casts` puts them in their places with everything that belongs to them. It may be told of further policies while
it is applied. Older wrappers then stay alive under the newer ones, so that no other thread meets an op without a
wrapper meanwhile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import wrapt

from hmpx.base import process_state
from hmpx.base.changes import Changes, Flag
from hmpx.ops import autocast
from hmpx.ops.autocast import operator_patches
from hmpx.ops.compilers import Compilers, forget_compiled
from hmpx.ops.computing.kernels import Kernels, in_fp32, parametrizations
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.holders import CapturedName
from hmpx.ops.outside_model import OutsideModel
from hmpx.ops.overlays import Policies
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import Entry, catalog
from hmpx.ops.policies.composition import SPARSE_GRADIENTS
from hmpx.ops.policies.lists import SIDES, is_shipped
from hmpx.ops.policies.policy import Case, Policy, Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.rebinding import Rebinding
from hmpx.ops.user_functions import UserFunctions
from hmpx.ops.wrapping.observing import Observer
from hmpx.ops.wrapping.overriding import Modes
from hmpx.ops.wrapping.switch import Switch
from hmpx.ops.wrapping.wrappers import (
    Patch,
    Patches,
    Patching,
    build_choice,
    build_explaining,
    build_refusing,
    build_scoped,
    build_telling,
    build_untouched,
    named_like,
)

Cases = tuple[Case, ...]
Wanted = tuple[str, Entry, Mapping[int, Cases]]  # an op's name, one of its entry points, and its cases in each scope
_FAST_PATH = Flag(
    "the fast path of torch.nn.MultiheadAttention",
    torch.backends.mha.get_fastpath_enabled,
    torch.backends.mha.set_fastpath_enabled,
)


class Casts:
    """All changes that policies need, built from torch as it is now and put in place by `apply`.

    patched: every attribute that is changed.
    """

    def __init__(self, table: PatchTable) -> None:
        self._table = table
        self._functions = UserFunctions(table.policies, table.switch)
        self._compilers = Compilers(table.switch.everywhere)
        self._rebindings: list[Rebinding] = []

    @property
    def patched(self) -> tuple[Patch, ...]:
        return (*self._table.standing.values(), *self._functions.patched.values())

    @property
    def rebound(self) -> list[CapturedName]:
        """Every place outside torch that had captured a function and has its wrapper."""
        return [capture for rebinding in self._rebindings for capture in rebinding.rebound]

    @property
    def escaped(self) -> list[CapturedName]:
        """Every place outside torch that holds a function of torch now."""
        return [capture for rebinding in self._rebindings for capture in rebinding.escaped]

    @property
    def foreign(self) -> list[str]:
        """What stands in torch's place and is no function, a sentence each."""
        return list(self._table.foreign.values())

    @property
    def waiting(self) -> list[str]:
        """Dotted names whose module is not imported yet."""
        return self._functions.waiting

    def apply(self, changes: Changes) -> None:
        self._compilers.apply(changes)
        Modes(changes)
        self._put(self._table, changes)
        self._table.outside.apply(changes, self._rebindings[0], self._table.know)
        forget_compiled()  # what was compiled before calls torch's own functions
        if self._table.mapping:
            self._table.mapping.apply(changes)

    def extend(self, changes: Changes) -> None:
        """Put in place the changes of policies that were added since, until `changes` are undone."""
        own = Changes()
        try:
            self._functions.add(self._table.policies)
            self._put(self._table.extend(), own)
        except BaseException:
            own.close()
            raise
        changes.callback(own.close)

    def _put(self, patches: Patches, changes: Changes) -> None:
        """Put patches, and functions that lists name, in place with everything that belongs to them."""
        rebinding = self._functions.rebinding = Rebinding()
        rebinding.around(changes, patches, self._functions)
        policies = self._table.policies
        self._compilers.add(patches.originals(), self._table.in_words(), changes)
        changes.put(process_state.variable("known_scopes"), frozenset(policies))
        if any(policy.bf16 or policy.fp8 or policy.fp32 for policy in policies.values()):
            changes.put(_FAST_PATH, False)  # TransformerEncoder in eval would run in one C++ call that no patch sees
        self._rebindings.append(rebinding)
        self._table.know(*patches.patches)


class PatchTable(Patches):
    """The patches of one conversion. When they are undone, the wrappers become inert.

    Args:
        policies: by scope, 0 among them; they may become more.
        observer: is handed the calls of ops; if it wants them all, those that no policy concerns are patched too.
        mapping: puts wrappers of its own around those of the policies.
        kernels: computes the ops that run in BF16 or FP16 on a CPU.
        everywhere: whether every op is cast, and not the model's alone.
    """

    def __init__(
        self,
        policies: Policies,
        observer: Observer | None,
        mapping: DtypeMap | None,
        kernels: Kernels,
        everywhere: bool,
    ) -> None:
        self.policies, self.mapping = policies, mapping
        self.switch, self._kernels, self._observer = Switch(everywhere), kernels, observer
        self.outside = OutsideModel(self.switch)
        self._functions: dict[tuple[int, bool], _Function] = {}  # one object under several names stays one object
        self.standing: dict[tuple[int, str], Patch] = {}  # by owner and attribute
        self.foreign: dict[str, str] = {}  # what stands in torch's place and is no function, in words
        self._tables: dict[Policy, dict[str, Cases]] = {}  # the cases of each op, by policy: many scopes have one
        self._low = mapping is not None  # whether some op is given low precision
        self._asked: set[str] = set()  # unsafe ops that a list of the user's own names
        patches = (
            *self._further(),
            *self.outside.patches(),
            *parametrizations(self.switch),
            *(autocast.questions(self.switch, policies) if governs_autocast(policies[0]) else ()),
            *(operator_patches(self.switch, policies) if governs_autocast(policies[0]) else ()),
        )
        super().__init__(mapping.patches(patches, self.switch) if mapping else patches)

    def apply(self, changes: Changes) -> None:
        super().apply(changes)
        changes.callback(self.switch.retire)

    def in_words(self) -> str:
        """Say all that the wrappers do."""
        return f"{self.policies}{self.mapping or ''}{self._kernels}"

    def extend(self) -> Patches:
        """Return the further patches of policies that were added since, to be undone before this table."""
        return Patches(self._further())

    def _further(self) -> Iterator[Patch]:
        """Yield the patches of functions that have none yet, or that need another wrapper."""
        policies = self.policies
        for policy in policies.values():
            if policy not in self._tables:
                self._tables[policy] = {name: policy.cases(op) for name, op in catalog().items()}
            self._low = self._low or bool(policy.bf16 or policy.fp8)
            origins = policy.origins
            self._asked |= {op for op in op_facts.UNSAFE_OF_LOW if op in origins and not is_shipped(origins[op])}
        wanted = self._wanted({scope: self._tables[policy] for scope, policy in policies.items()})
        if self._observer is not None and self._observer.everything:
            wanted = _with_the_others(wanted)
        for op, entry, cases in wanted:
            key = id(entry.owner), entry.attribute
            old = self.standing.get(key)
            original = wrapt.resolve_path(entry.owner, entry.attribute)[2] if old is None else old.original
            if not inspect.isroutine(original):  # it has no name, and attributes that a wrapper would hide
                kind = type(original).__name__
                self.foreign[entry.label] = f"{entry.label} is a {kind} that somebody has put there, and stays so"
                continue
            function = self._functions.get((id(original), entry.in_place))
            if function is None:
                function = _Function(op, entry, original, self._build)
                self._functions[id(original), entry.in_place] = function
            wrapper = function.wrapper(cases)
            if old is None or old.wrapper is not wrapper:
                rule = next((case.rule for each in cases.values() for case in each if case.rule is not None), None)
                uncast = Patching.EXPLAINED if self._observer is None else Patching.OBSERVED
                how = uncast if rule is None else Patching.CAST
                older = None if old is None else old.wrapper
                yield Patch(op, how, rule, entry.label, entry.owner, entry.attribute, original, wrapper, older)

    def know(self, *patches: Patch) -> None:
        """Note patches that stand in torch."""
        self.standing |= {(id(patch.owner), patch.attribute): patch for patch in patches}

    def _wanted(self, scopes: Mapping[int, Mapping[str, Cases]]) -> Iterator[Wanted]:
        """Yield entry points that a rule needs, with their cases; under low precision, those that may refuse it too."""
        for name, op in catalog().items():
            ruled = any(case.rule is not None for table in self._tables.values() for case in table[name])
            explained = self._low and not op.view and _may_refuse_low(name, ())
            cases = {scope: table[name] for scope, table in scopes.items()}
            for entry in op.entries:
                if entry.in_place:
                    # torch's in-place ops keep the first tensor and convert the others; only where it refuses is there
                    # something to do. Its own conversion rounds once where a cast before it would round twice.
                    if op.refuses_mixed:
                        yield name, entry, {0: (Case(Rule.FIRST_INPUT),)}
                elif ruled or (explained and not entry.signature.python) or name in op_facts.WRONG_IN_LOW:
                    yield name, entry, cases

    def _build(self, op: str, entry: Entry, original: Callable, cases: Cases) -> Callable:
        function = in_fp32(original) if op in op_facts.WRONG_IN_LOW else original

        def running(case: Case) -> Callable:
            if case.when is not None and case.when is SPARSE_GRADIENTS.get(op):
                return build_telling(op, cases[-1].rule, function)
            kernel = None if entry.in_place else self._kernels.kernel(op, case)
            return function if kernel is None else kernel.wrap(op, original)

        built = build_choice(op, entry, cases, function, self.switch, running, self._observer)
        if function is not original:
            return named_like(built, entry.label, original)
        if self._low and _may_refuse_low(op, cases):
            return build_explaining(op, entry.label, original, built)
        instead = op_facts.UNSAFE_OF_LOW.get(op)
        if instead is None or not self._low or built is original:
            return built
        return build_refusing(op, entry.label, original, built, self.switch, instead, op in self._asked)


class _Function:
    """One function of torch and its wrapper."""

    def __init__(self, op: str, entry: Entry, original: Callable, build: Callable[..., Callable]) -> None:
        self._op, self._entry, self._original, self._build = op, entry, original, build
        self._built: dict[Cases, Callable] = {}
        self._runs: dict[int, Callable] = {}  # by scope; the scoped wrapper looks here
        self._scoped: Callable | None = None

    def wrapper(self, cases: Mapping[int, Cases]) -> Callable:
        """Return a wrapper of one rule if all scopes agree; else one that asks for the scope in each call."""
        for scope, each in cases.items():
            if scope not in self._runs:
                if each not in self._built:
                    built = self._build(self._op, self._entry, self._original, each)
                    self._built[each] = build_untouched(built) if built is self._original else built
                self._runs[scope] = self._built[each]
        if self._scoped is None and len(self._built) > 1:
            self._scoped = build_scoped(self._entry, self._original, self._runs)
        return self._runs[0] if self._scoped is None else self._scoped


def governs_autocast(policy: Policy) -> bool:
    """Return whether regions of torch.autocast are those of the lists: one without lists leaves ops to it."""
    return any(getattr(policy, side) for side in SIDES)


def _may_refuse_low(op: str, cases: Cases) -> bool:
    """Return whether torch may refuse a BF16 input of this op, which no list names."""
    named = op in op_facts.NO_LOW_KERNEL or op.startswith(op_facts.NO_LOW_KERNELS)
    return named and all(case.rule in (None, Rule.FIRST_INPUT, Rule.PROMOTE) for case in cases)


def _with_the_others(wanted: Iterable[Wanted]) -> Iterator[Wanted]:
    """Yield `wanted`, and the ops without a rule.

    Not among them: views, ops that make no new values, and Python functions of torch, whose parts are seen.
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
