"""Functions outside torch that lists name by a dotted name (`torchvision.ops.nms`): ops like any other.

They are patched where they stand, now or when their module is imported. `decorators` says what happens in a call.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import wrapt

from hmpx import region_state
from hmpx.awaited import await_module, stop_waiting
from hmpx.changes import Changes
from hmpx.errors import HmpxError, UnknownOpError, did_you_mean
from hmpx.ops.captured_names.rebinding import Rebinding
from hmpx.ops.decorators import wrap
from hmpx.ops.policies.op_lists import is_shipped, read_file, shipped
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.wrappers import Patch, Patching

logger = logging.getLogger("hmpx")
_HEAP_TYPE = 1 << 9  # the flag of a type made by a class statement


class UserFunctions:
    """The dotted names of policies: patched where they stand now, or as soon as their module is imported.

    policies: by the place in which each holds, 0 among them.
    """

    def __init__(self, policies: Mapping[int, Policy], rebinding: Rebinding | None = None) -> None:
        self._rebinding = rebinding
        self.rules: dict[str, dict[int, Rule | None]] = {}
        self.origins: dict[str, str] = {}
        self._know(policies)
        self.patched: dict[str, Patch] = {}
        self._retired = False

    def _know(self, policies: Mapping[int, Policy]) -> list[str]:
        """Add policies; the names that are new."""
        listed = {place: policy.user_functions() for place, policy in policies.items()}
        names = dict.fromkeys(name for rules in listed.values() for name in rules)
        new = [name for name in names if name not in self.rules]
        for name in (*self.rules, *new):
            rules = {place: each.get(name) for place, each in listed.items()}
            self.rules.setdefault(name, {}).update(rules)
        for policy in policies.values():
            self.origins = dict(policy.origins) | self.origins
        return new

    def extend(self, policies: Mapping[int, Policy]) -> None:
        """Add policies. New names are patched until the others end."""
        new = self._know(policies)
        for name in new:
            self._take_or_await(name)
        if self._rebinding is not None:
            self._rebinding.add(_replacements([self.patched[name] for name in new if name in self.patched]))

    def check(self) -> None:
        """Raise `UnknownOpError` for a name that its imported module does not have; nothing is changed."""
        for name in self.rules:
            module, found = _longest_module(name), None
            if module is not None:
                found = self._find(name, *module)
            if found is not None:
                owner, _, original = found
                if isinstance(owner, type) and not owner.__flags__ & _HEAP_TYPE:
                    raise UnknownOpError(f"{self._where(name)}: {owner.__name__} is a type in C and cannot be changed")
                wrap(original, self.rules[name], f"{self._where(name)}: {name}", self._active)

    @property
    def waiting(self) -> list[str]:
        """Names whose module is not imported yet, except names in hmpx's own lists."""
        waiting = [name for name in self.rules if name not in self.patched and name not in _shipped_names()]
        return [] if self._retired else waiting

    def _ships(self, name: str) -> bool:
        """Whether the name comes from hmpx's own lists, for which a missing function is no error."""
        return is_shipped(self.origins.get(name, ""))

    def apply(self, changes: Changes) -> None:
        """Patch the imported functions, until `changes` are undone."""
        self._changes = changes
        changes.callback(self._retire)
        for name in self.rules:
            self._take_or_await(name)

    def _take_or_await(self, name: str) -> None:
        module = _longest_module(name)
        if module is None or not self._patch(name, *module):
            self._await(name)

    def _find(self, name: str, prefix: str, module: Any) -> tuple[Any, str, Any] | None:
        """Owner, attribute and function; None where a submodule of that name may still come."""
        path = name.removeprefix(prefix + ".")
        try:
            return wrapt.resolve_path(module, path)
        except AttributeError:
            if hasattr(module, "__path__") or self._ships(name):
                return None
            message = f"{self._where(name)}: {prefix} has no {path!r}{did_you_mean(path, dir(module))}"
            raise UnknownOpError(message) from None

    def _patch(self, name: str, prefix: str, module: Any) -> bool:
        found = self._find(name, prefix, module)
        if found is None:
            return False
        owner, attribute, original = found
        rules = self.rules[name]
        rule = next(filter(None, rules.values()))
        wrapper = wrap(original, rules, name, self._active)
        patch = Patch(name, Patching.CAST, rule, name, owner, attribute, original, wrapper)
        if self._rebinding is not None:
            self._rebinding.expect(lambda: _replacements([patch]))
        self._changes.put(patch.place, patch.wrapper)
        self.patched[name] = patch
        return True

    def _await(self, name: str) -> None:
        parent = name.rpartition(".")[0]
        if name not in _shipped_names() and not _findable(parent.partition(".")[0]):
            logger.warning("%s: %s is not importable now; it is patched if it appears", self._where(name), name)
        # A name may lie in a module (pkg.ops.nms) or in a class of one (pkg.ops.Box.area): wait for both.
        for module in {parent, parent.rpartition(".")[0]} - {""}:
            await_module(module, self)

    def take(self, module: types.ModuleType) -> None:
        """Patch the functions of a module that has just been imported."""
        for name in () if self._retired else self.waiting_for(module.__name__):
            try:
                if self._patch(name, module.__name__, module) and self._rebinding is not None:
                    self._rebinding.add_imported(_replacements([self.patched[name]]), _package(name))
            except HmpxError as error:  # an import is no place to raise; the handle goes on to say that it escaped
                logger.warning("%s", error)

    def waiting_for(self, module: str) -> list[str]:
        return [name for name in self.rules if name.startswith(f"{module}.") and name not in self.patched]

    def _where(self, name: str) -> str:
        return self.origins.get(name, "policy")

    def _active(self) -> bool:
        return not self._retired and region_state.casts_on()

    def _retire(self) -> None:
        self._retired = True
        stop_waiting(self)

    def replacements(self) -> list[tuple[Any, Any]]:
        """Originals and wrappers, for names captured elsewhere."""
        return _replacements(self.patched.values())


@functools.cache
def _shipped_names() -> frozenset[str]:
    """The dotted names in hmpx's own lists: of libraries that a program may do without.

    A printed recipe repeats them; so it is the name that tells, and not the list that it stands in.
    """
    files = [read_file(path, "bf16") for path in shipped().glob("*/*.txt")]
    return frozenset(listed.name for lists in files for listed in lists.bf16 or () if "." in listed.name)


def _replacements(patches: Iterable[Patch]) -> list[tuple[Any, Any]]:
    """A method is found through its class, so it has none."""
    return [(patch.original, patch.wrapper) for patch in patches if not isinstance(patch.owner, type)]


def _package(name: str) -> list[types.ModuleType]:
    """The imported modules of the package that a dotted name is in, one of which may define what another offers."""
    package = name.partition(".")[0]
    modules = [(each, module) for each, module in list(sys.modules.items()) if each.partition(".")[0] == package]
    return [module for _, module in modules if issubclass(type(module), types.ModuleType)]  # no `__class__` of a proxy


def _longest_module(name: str) -> tuple[str, Any] | None:
    """The longest prefix of `name` that is an imported module, and the module."""
    prefix = name.rpartition(".")[0]
    while prefix:
        if sys.modules.get(prefix) is not None:
            return prefix, sys.modules[prefix]
        prefix = prefix.rpartition(".")[0]
    return None


def _findable(top_level: str) -> bool:
    try:
        return importlib.util.find_spec(top_level) is not None
    except (ImportError, ValueError):
        return False
