"""`PatchTable`: what a policy changes in torch. Built without touching anything, then applied through `changes`."""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import wrapt

from hmpx.casts import op_facts
from hmpx.casts.codegen import Switch
from hmpx.casts.fp32_kernels import NATIVE, Kernels
from hmpx.casts.layouts import Layout
from hmpx.casts.observing import Observer
from hmpx.casts.ops import Entry, catalog
from hmpx.casts.policy import Case, Policy, Rule
from hmpx.casts.wrappers import build_carrying, build_check, build_choice, build_placed, build_uncast
from hmpx.changes import Attribute, Changes

Cases = tuple[Case, ...]
Wanted = tuple[str, Entry, Mapping[int, Cases]]  # an op's name, one of its entry points, and what it does in each place


class Patching(enum.Enum):
    """What a patch does to the calls of an entry point."""

    CAST = "cast"  # the arguments are cast as its rule says
    UNCAST = "uncast"  # no casts inside: not the model's forward
    CHECK = "check"  # a layer's check of its input's dtype accepts what will be cast
    CARRYING = "carrying"  # a function that it keeps, to call it later, runs in the region of now
    OBSERVED = "observed"  # nothing but that an observer sees them
    DTYPE_MAP = "dtype map"  # a dtype that is asked for becomes another

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Patch:
    """One attribute, before and after.

    how: what the patch does. rule: of one that casts, what the policy says (where that depends on the arguments of a
    call, the first of its cases); else None.
    """

    op: str
    how: Patching
    rule: Rule | None
    label: str
    owner: Any
    attribute: str
    original: Any
    wrapper: Any
    inherited: bool

    def __str__(self) -> str:
        return f"{self.label:45} {self.rule or self.how}"

    @property
    def place(self) -> Attribute:
        return Attribute(self.owner, self.attribute, self.label)


class PatchTable:
    """The patches of one conversion.

    patches: every attribute that is changed, in order.
    """

    def __init__(self, patches: tuple[Patch, ...], switch: Switch) -> None:
        self.patches = patches
        self.switch = switch

    @classmethod
    def build(
        cls,
        policies: Policy | Mapping[int, Policy],
        observer: Observer | None = None,
        around: Callable[[tuple[Patch, ...], Switch], Iterator[Patch]] | None = None,
        kernels: Kernels = NATIVE,
    ) -> PatchTable:
        """Work out what policies change.

        policies: the one that holds everywhere, or those that hold in places by their number, 0 among them.
        observer: is handed the calls of ops; if it wants them all, those that no policy concerns are patched too.
        around: puts wrappers of its own around those of the policies.
        kernels: what computes the ops that run in BF16 or FP16 on a CPU.
        """
        switch = Switch()
        patches = []
        wrappers: dict[tuple[int, tuple, bool], Callable] = {}
        wanted = _wanted({0: policies} if isinstance(policies, Policy) else policies)
        if observer is not None and observer.everything:
            wanted = _with_the_others(wanted)
        for op, entry, cases in wanted:
            original, inherited = _read(entry.owner, entry.attribute)
            rule = next((case.rule for each in cases.values() for case in each if case.rule is not None), None)
            # One object under several names gets one wrapper, and so stays one object.
            key = id(original), tuple(cases.items()), entry.in_place
            if key not in wrappers:
                wrappers[key] = _wrapper(op, entry, cases, original, switch, kernels, observer)
            how = Patching.OBSERVED if rule is None else Patching.CAST
            patches.append(_patch(op, how, rule, entry, original, wrappers[key], inherited))
        patches += _beside_casts(switch)
        return cls(tuple(around(tuple(patches), switch) if around else patches), switch)

    def __str__(self) -> str:
        return "\n".join(map(str, self.patches))

    def originals(self) -> dict[Callable, Callable]:
        """What each wrapper stands for."""
        return {patch.wrapper: patch.original for patch in self.patches}

    def apply(self, changes: Changes) -> None:
        """Put every wrapper in its place, until `changes` are undone, which makes the wrappers inert."""
        for patch in self.patches:
            changes.put(patch.place, patch.wrapper)
        changes.callback(self.switch.retire)

    def replacements(self) -> list[tuple[Any, Any]]:
        """Originals and their wrappers, for names captured elsewhere."""
        return [(patch.original, patch.wrapper) for patch in self.patches]


def _wrapper(
    op: str,
    entry: Entry,
    cases: Mapping[int, Cases],
    original: Callable,
    switch: Switch,
    kernels: Kernels,
    observer: Observer | None,
) -> Callable:
    """The wrapper of one entry point: of one rule where that is the same in all places."""

    def build(cases: Cases) -> Callable:
        run = kernels.wrap(op, [case.rule for case in cases], original)
        return build_choice(op, entry, cases, original, switch, run, observer)

    built = {each: build(each) for each in dict.fromkeys(cases.values())}
    if len(built) == 1:
        return built[cases[0]]
    return build_placed(entry, original, {place: built[each] for place, each in cases.items()})


def _beside_casts(switch: Switch) -> Iterator[Patch]:
    """What is no op of a model, but must know of casts."""
    uncast: dict[int, Callable] = {}
    for path in uncast_functions():
        owner, attribute = _split(path)
        if hasattr(owner, attribute):
            entry = Entry(owner, attribute, path, Layout(python=True))
            original, inherited = _read(owner, attribute)
            wrapper = uncast.setdefault(id(original), build_uncast(entry, original, switch))
            yield _patch(attribute, Patching.UNCAST, None, entry, original, wrapper, inherited)
    for path, weights in op_facts.INPUT_CHECKS.items():
        yield _beside_ops(path, Patching.CHECK, functools.partial(build_check, weights, switch))
    for path, position in op_facts.CALLED_LATER.items():
        yield _beside_ops(path, Patching.CARRYING, functools.partial(build_carrying, position, switch))


def _wanted(policies: Mapping[int, Policy]) -> Iterator[Wanted]:
    """Every entry point that some rule needs, with its cases."""
    for op in catalog().values():
        cases = {place: policy.cases(op) for place, policy in policies.items()}
        for entry in op.entries:
            if entry.in_place:
                # torch's in-place ops keep the first tensor and convert the others; only where it refuses is there
                # something to do. Its own conversion rounds once where a cast before it would round twice.
                if op.refuses_mixed:
                    yield op.name, entry, {0: (Case(Rule.FIRST_INPUT),)}
            elif any(case.rule is not None for each in cases.values() for case in each):
                yield op.name, entry, cases


def _with_the_others(wanted: Iterable[Wanted]) -> Iterator[Wanted]:
    """`wanted`, and the ops that no rule concerns, with casts by hand.

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
                if not entry.layout.python and (id(entry.owner), entry.attribute) not in found:
                    yield each.name, entry, nothing
    for method in op_facts.CASTS_BY_HAND:
        yield "to", Entry(torch.Tensor, method, f"Tensor.{method}", Layout()), nothing


def _patch(
    op: str, how: Patching, rule: Rule | None, entry: Entry, original: Any, wrapper: Any, inherited: bool
) -> Patch:
    return Patch(op, how, rule, entry.label, entry.owner, entry.attribute, original, wrapper, inherited)


def patch_at(path: str, how: Patching, build: Callable[[Any], Any]) -> Patch:
    """The patch of one dotted name in torch that casts nothing. `build` makes what stands there of what stood there."""
    owner, attribute, original = wrapt.resolve_path(*_split(path))
    inherited = attribute not in vars(owner)
    return Patch(attribute, how, None, path, owner, attribute, original, build(original), inherited)


def _beside_ops(path: str, how: Patching, build: Callable[[Any], Callable]) -> Patch:
    """The patch of a function that is no op, but depends on what is cast."""

    def built(original: Any) -> Any:
        static = isinstance(original, staticmethod)
        function = original.__func__ if static else original
        wrapper = build(function)
        wrapper.__module__, wrapper.__qualname__ = function.__module__, function.__qualname__
        wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
        return staticmethod(wrapper) if static else wrapper

    return patch_at(path, how, built)


def _split(path: str) -> tuple[Any, str]:
    """Owner and attribute of a dotted name in torch."""
    name, _, attribute = path.rpartition(".")
    return pkgutil.resolve_name(name), attribute


def uncast_functions() -> Iterator[str]:
    """Dotted names in torch of what is not the model's forward."""
    yield from op_facts.UNCAST_FUNCTIONS
    for name in op_facts.UNCAST_MODULES:
        for attribute, value in vars(importlib.import_module(name)).items():
            if inspect.isfunction(value) and attribute.endswith("_") and not attribute.startswith("_"):
                yield f"{name}.{attribute}"


def _read(owner: Any, attribute: str) -> tuple[Any, bool]:
    """The attribute as it stands in the namespace, or along a class's MRO; and whether it is inherited."""
    _, _, original = wrapt.resolve_path(owner, attribute)
    return original, attribute not in vars(owner)
