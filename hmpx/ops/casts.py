"""Everything that policies change in torch, as one part: wrappers, captured names, and compilers that look names up.

`PatchTable` works out the wrappers without touching anything. `Casts` puts them in their places with all that belongs
to them. It may be told of further policies while it is applied. Older wrappers then stay alive under the newer ones, so
that no other thread meets an op without a wrapper meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hmpx import process_state
from hmpx.changes import Attribute, Changes, Flag
from hmpx.ops import dynamo, torchscript
from hmpx.ops.beside_model import Later, Uncast
from hmpx.ops.captured_names.rebinding import Rebinding
from hmpx.ops.captured_names.rewriting import Capture
from hmpx.ops.computing.kernels import NATIVE, Kernels
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.op_wrappers import Wrappers
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import Entry
from hmpx.ops.policies.policy import Policy
from hmpx.ops.policies.scopes import Policies
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.user_functions import UserFunctions
from hmpx.ops.wrapping.codegen import Switch
from hmpx.ops.wrapping.observing import Observer
from hmpx.ops.wrapping.patches import Patch, Patching, patch_at, split_path
from hmpx.ops.wrapping.wrappers import build_carrying, build_check, build_explaining

_FAST_PATH = Flag(
    "the fast path of torch.nn.MultiheadAttention",
    torch.backends.mha.get_fastpath_enabled,
    torch.backends.mha.set_fastpath_enabled,
)
_KNOWN_SCOPES = Attribute(process_state, "known_scopes", "the scopes that are known")


class Casts:
    """All changes that policies need, built from torch as it is now and put in place by `apply`.

    policies: by scope; they may become more. patched: every attribute that is changed, or will be.
    """

    def __init__(
        self, policies: Policies, observer: Observer | None, mapping: DtypeMap | None, kernels: Kernels
    ) -> None:
        self._policies, self._mapping, self._kernels = policies, mapping, kernels
        self._table = PatchTable.build(policies, observer, mapping.patches if mapping else None, kernels)
        self._rebindings = [Rebinding()]
        self._functions = UserFunctions(policies, self._rebindings[0])
        self._tracing = dynamo.Tracing(self._table.originals, self._in_words())
        self._scripting = torchscript.Scripting(self._table.originals)
        self._of_table: dict[tuple[int, str], Patch] = {}
        self._know(*self._table.patches)

    @property
    def patched(self) -> tuple[Patch, ...]:
        return (*self._of_table.values(), *self._functions.patched.values())

    @property
    def captures(self) -> list[Capture]:
        """Every place outside torch that had captured a function."""
        return [capture for rebinding in self._rebindings for capture in rebinding.captures]

    @property
    def waiting(self) -> list[str]:
        """Dotted names whose module is not imported yet."""
        return self._functions.waiting

    def apply(self, changes: Changes) -> None:
        self._rebindings[0].around(changes, self._table, self._functions)
        Later(self._table.uncast, self._rebindings[0], self._know).apply(changes)
        self._tracing.apply(changes)
        self._scripting.apply(changes)
        self._beside(changes)
        if self._mapping:
            self._mapping.apply(changes)

    def extend(self, changes: Changes) -> None:
        """Put in place the changes of policies that were added since, until `changes` are undone."""
        own = Changes()
        try:
            table, rebinding = self._table.extend(self._policies), Rebinding()
            self._functions.extend(self._policies)
            rebinding.around(own, table)
            originals = table.originals()
            self._tracing.extend(originals, self._in_words())
            self._scripting.extend(originals, own)
            self._beside(own)
        except BaseException:
            own.close()
            raise
        self._rebindings.append(rebinding)
        self._know(*table.patches)
        changes.callback(own.close)

    def _know(self, *patches: Patch) -> None:
        self._of_table |= {(id(patch.owner), patch.attribute): patch for patch in patches}

    def _beside(self, changes: Changes) -> None:
        changes.put(_KNOWN_SCOPES, frozenset(self._policies))
        if any(policy.bf16 or policy.fp8 or policy.fp32 for policy in self._policies.values()):
            changes.put(_FAST_PATH, False)  # TransformerEncoder in eval would run in one C++ call that no patch sees

    def _in_words(self) -> str:
        """Policies, dtype map and kernels in words."""
        return f"{self._policies}{self._mapping or ''}{self._kernels}"


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
        """Work out the changes that policies need.

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

    def extend(self, policies: Mapping[int, Policy]) -> PatchTable:
        """The further changes if these policies hold in more scopes: a table over this one, undone before it."""
        return PatchTable(tuple(self._wrappers.patches(policies)), self._wrappers, self.uncast, beginning=False)

    def __str__(self) -> str:
        return "\n".join(map(str, self.patches))

    def originals(self) -> dict[Callable, Callable]:
        """Each wrapper with its original."""
        return {patch.wrapper: patch.original for patch in self.patches}

    def apply(self, changes: Changes) -> None:
        """Put every wrapper in its place, until `changes` are undone, which makes the wrappers inert."""
        for patch in self.patches:
            changes.put(patch.place, patch.wrapper)
        if self._beginning:
            changes.callback(self._wrappers.switch.retire)

    def replacements(self) -> list[tuple[Any, Any]]:
        """Each original with its wrapper, for names captured elsewhere."""
        return [(patch.before, patch.wrapper) for patch in self.patches]


def _beside_casts(switch: Switch) -> Iterator[Patch]:
    """Patches of functions that are no ops of a model, but must know of casts."""
    for path in op_facts.NO_LOW_FUNCTIONS:
        yield _explaining(path)
    for path, weights in op_facts.INPUT_CHECKS.items():
        yield _beside_ops(path, Patching.CHECK, functools.partial(build_check, weights, switch))
    for path, position in op_facts.CALLED_LATER.items():
        yield _beside_ops(path, Patching.CARRYING, functools.partial(build_carrying, position, switch))


def _explaining(path: str) -> Patch:
    """The patch of a function that no list names and that may refuse BF16."""
    owner, attribute = split_path(path)
    entry = Entry(owner, attribute, path, Signature())
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
