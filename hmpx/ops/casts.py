"""Everything that policies change in torch, as one part: wrappers, captured names, and compilers that look names up.

It may be told of further policies while it is applied. Older wrappers then stay alive under the newer ones, so that no
other thread meets an op without a wrapper meanwhile.
"""

from __future__ import annotations

import torch

from hmpx import process_state
from hmpx.changes import Attribute, Changes, Flag
from hmpx.ops.captured_names.rebinding import Rebinding
from hmpx.ops.captured_names.rewriting import Capture
from hmpx.ops.compilers import Scripting, Tracing
from hmpx.ops.computing.kernels import Kernels
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.patch_table import PatchTable
from hmpx.ops.policies.policy import Policies
from hmpx.ops.user_functions import UserFunctions
from hmpx.ops.wrapping.observing import Observer
from hmpx.ops.wrapping.wrappers import Patch

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
        self._table = PatchTable(policies, observer, mapping.patches if mapping else None, kernels)
        self._rebindings = [Rebinding()]
        self._functions = UserFunctions(policies, self._rebindings[0])
        self._tracing = Tracing()
        self._scripting = Scripting()
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
        self._table.beside.await_modules(changes, self._rebindings[0], self._know)
        self._tracing.apply(changes, self._table.originals(), self._in_words())
        self._scripting.apply(changes, self._table.originals())
        self._set_flags(changes)
        if self._mapping:
            self._mapping.apply(changes)

    def extend(self, changes: Changes) -> None:
        """Put in place the changes of policies that were added since, until `changes` are undone."""
        own = Changes()
        try:
            further, rebinding = self._table.extend(self._policies), Rebinding()
            self._functions.extend(self._policies)
            rebinding.around(own, further)
            originals = further.originals()
            self._tracing.extend(originals, self._in_words())
            self._scripting.extend(originals, own)
            self._set_flags(own)
        except BaseException:
            own.close()
            raise
        self._rebindings.append(rebinding)
        self._know(*further.patches)
        changes.callback(own.close)

    def _know(self, *patches: Patch) -> None:
        self._of_table |= {(id(patch.owner), patch.attribute): patch for patch in patches}

    def _set_flags(self, changes: Changes) -> None:
        changes.put(_KNOWN_SCOPES, frozenset(self._policies))
        if any(policy.bf16 or policy.fp8 or policy.fp32 for policy in self._policies.values()):
            changes.put(_FAST_PATH, False)  # TransformerEncoder in eval would run in one C++ call that no patch sees

    def _in_words(self) -> str:
        """Describe policies, dtype map and kernels."""
        return f"{self._policies}{self._mapping or ''}{self._kernels}"
