"""`PatchTable`: what a policy changes in torch. Built without touching anything, then applied through `changes`."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import wrapt

from hmpx.changes import Changes
from hmpx.ops import op_facts
from hmpx.ops.beside_model import Uncast
from hmpx.ops.catalog import Entry
from hmpx.ops.codegen import Switch
from hmpx.ops.fp32_kernels import NATIVE, Kernels
from hmpx.ops.layouts import Layout
from hmpx.ops.observing import Observer
from hmpx.ops.op_wrappers import Patch, Patching, Wrappers
from hmpx.ops.policy import Policy
from hmpx.ops.wrappers import build_carrying, build_check, build_explaining


class PatchTable:
    """The patches of one conversion.

    patches: every attribute that is changed, in order. uncast: makes those of what runs beside the model.
    """

    def __init__(self, patches: tuple[Patch, ...], wrappers: Wrappers, uncast: Uncast, beginning: bool = True) -> None:
        self.patches, self.uncast = patches, uncast
        self._wrappers, self._beginning = wrappers, beginning

    @classmethod
    def build(
        cls,
        policies: Policy | Mapping[int, Policy],
        observer: Observer | None = None,
        around: Callable[[tuple[Patch, ...], Switch], Iterator[Patch]] | None = None,
        kernels: Kernels = NATIVE,
    ) -> PatchTable:
        """Work out what policies change.

        policies: the one that holds everywhere, or those that hold in scopes by their number, 0 among them.
        observer: is handed the calls of ops; if it wants them all, those that no policy concerns are patched too.
        around: puts wrappers of its own around those of the policies.
        kernels: what computes the ops that run in BF16 or FP16 on a CPU.
        """
        switch = Switch()
        wrappers = Wrappers(switch, kernels, observer)
        by_scope = {0: policies} if isinstance(policies, Policy) else policies
        uncast = Uncast(switch)
        patches = (*wrappers.patches(by_scope), *uncast.patches(), *_beside_casts(switch))
        return cls(tuple(around(patches, switch)) if around else patches, wrappers, uncast)

    def further(self, policies: Mapping[int, Policy]) -> PatchTable:
        """What changes when these policies hold in further scopes too: a table over this one, which ends before it."""
        return PatchTable(tuple(self._wrappers.patches(policies)), self._wrappers, self.uncast, beginning=False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.patches))

    def originals(self) -> dict[Callable, Callable]:
        """What each wrapper stands for."""
        return {patch.wrapper: patch.original for patch in self.patches}

    def apply(self, changes: Changes) -> None:
        """Put every wrapper in its place, until `changes` are undone, which makes the wrappers inert."""
        for patch in self.patches:
            changes.put(patch.place, patch.wrapper)
        if self._beginning:
            changes.callback(self._wrappers.switch.retire)

    def replacements(self) -> list[tuple[Any, Any]]:
        """What stood there and its wrapper, for names captured elsewhere."""
        return [(patch.before, patch.wrapper) for patch in self.patches]


def _beside_casts(switch: Switch) -> Iterator[Patch]:
    """What is no op of a model, but must know of casts."""
    for path in op_facts.NO_LOW_FUNCTIONS:
        yield _explaining(path)
    for path, weights in op_facts.INPUT_CHECKS.items():
        yield _beside_ops(path, Patching.CHECK, functools.partial(build_check, weights, switch))
    for path, position in op_facts.CALLED_LATER.items():
        yield _beside_ops(path, Patching.CARRYING, functools.partial(build_carrying, position, switch))


def patch_at(path: str, how: Patching, build: Callable[[Any], Any]) -> Patch:
    """The patch of one dotted name in torch that casts nothing. `build` makes what stands there of what stood there."""
    owner, attribute, original = wrapt.resolve_path(*_split(path))
    inherited = attribute not in vars(owner)
    return Patch(attribute, how, None, path, owner, attribute, original, build(original), inherited, original)


def _explaining(path: str) -> Patch:
    """The patch of a function that is in no list, and may refuse BF16."""
    owner, attribute = _split(path)
    entry = Entry(owner, attribute, path, Layout())
    return patch_at(path, Patching.EXPLAINED, lambda function: build_explaining(path, entry, function, function))


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
