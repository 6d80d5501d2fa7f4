"""Casts are off in code of torch that is no part of a model: schedulers, initialisation, clipping, data loading.

Casts are off inside, so that it computes as it does without hmpx. `op_facts.BESIDE_THE_MODEL` names it by its place in
torch, and says why. A module that is not imported yet is patched as soon as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from hmpx import awaited
from hmpx.changes import Changes
from hmpx.ops.captured_names.rebinding import Rebinding
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import Entry
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.wrapping.codegen import Switch
from hmpx.ops.wrapping.patches import Patch, Patching, made_patch, read_attribute
from hmpx.ops.wrapping.wrappers import build_uncast


class Uncast:
    """Makes the patches that turn casts off: one wrapper for each function, whatever number of names it has."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self._wrappers: dict[int, Callable] = {}

    def patches(self) -> Iterator[Patch]:
        """The patches for every imported module."""
        for module in places():
            if module in sys.modules:
                yield from self.patches_in(module)

    def patches_in(self, module: str) -> Iterator[Patch]:
        """The patches for one module."""
        for owner, attribute, path in functions_in(module):
            entry = Entry(owner, attribute, path, Signature(python=True))
            original, inherited = read_attribute(owner, attribute)
            wrapper = self._wrappers.get(id(original))
            if wrapper is None:
                wrapper = self._wrappers[id(original)] = build_uncast(entry, original, self._switch)
            yield made_patch(attribute, Patching.UNCAST, None, entry, original, wrapper, inherited)


class Later:
    """A part: modules are patched when they are imported later.

    told: is handed each patch.
    """

    def __init__(self, uncast: Uncast, rebinding: Rebinding, told: Callable[[Patch], object]) -> None:
        self._uncast, self._rebinding, self._told = uncast, rebinding, told
        self._changes: Changes | None = None

    def apply(self, changes: Changes) -> None:
        self._changes = changes
        changes.callback(self._end)
        for module in places():
            if module not in sys.modules:
                awaited.await_module(module, self)

    def take(self, module: ModuleType) -> None:
        """Patch a module that has just been imported; nobody can have captured a name of it yet."""
        if self._changes is not None:
            patches = list(self._uncast.patches_in(module.__name__))
            self._rebinding.expect(lambda: [(patch.original, patch.wrapper) for patch in patches])
            for patch in patches:
                self._changes.put(patch.place, patch.wrapper)
                self._told(patch)

    def _end(self) -> None:
        self._changes = None
        awaited.stop_waiting(self)


@functools.cache
def places() -> dict[str, list[str]]:
    """The modules, each with the names of its functions and classes where casts are off; "" means all functions."""
    found: dict[str, list[str]] = {}
    for place in op_facts.BESIDE_THE_MODEL:
        module, _, name = place.partition(":")
        found.setdefault(module, []).append(name)
    return found


def functions_in(module: str) -> Iterator[tuple[Any, str, str]]:
    """Owner, attribute and dotted path of each such function in one imported module."""
    for name in places()[module]:
        found: Any = sys.modules[module]
        for part in name.split(".") if name else ():
            owner, found = found, getattr(found, part, None)  # None in a version of torch that does not have it
        if inspect.isfunction(found):
            yield owner, name.rpartition(".")[2], f"{module}.{name}"
        elif isinstance(found, type):
            for cls in _derived(found):
                yield from _own_functions(cls, f"{cls.__module__}.{cls.__qualname__}")
        elif found is not None:
            for owner, attribute, path in _own_functions(found, module):
                if vars(owner)[attribute].__module__ in places():
                    yield owner, attribute, path


def _own_functions(owner: Any, path: str) -> Iterator[tuple[Any, str, str]]:
    for attribute, value in list(vars(owner).items()):
        special = attribute.startswith("__") and attribute != "__init__"
        if inspect.isfunction(value) and not special and f"{path}.{attribute}" not in op_facts.IN_THE_MODEL:
            yield owner, attribute, f"{path}.{attribute}"


def _derived(cls: type) -> Iterator[type]:
    """A class of torch, and the classes of torch that derive from it."""
    yield cls
    derived: list[type] = cls.__subclasses__()
    for each in derived:
        if each.__module__.startswith("torch."):
            yield from _derived(each)
