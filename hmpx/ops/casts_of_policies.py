"""Everything that policies change in torch, as one part: wrappers, captured names, and who finds functions by name.

It may be told of further policies while it is applied. Older wrappers then stay alive under the newer ones, so that no
other thread meets an op without a wrapper meanwhile.
"""

from __future__ import annotations

import torch

from hmpx import process_state
from hmpx.changes import Attribute, Changes, Flag
from hmpx.ops import dynamo, torchscript
from hmpx.ops.beside_model import Later
from hmpx.ops.captured_names.places import Capture
from hmpx.ops.captured_names.rebinding import Rebinding, WithCaptures
from hmpx.ops.dtype_map import DtypeMap
from hmpx.ops.fp32_kernels import Kernels
from hmpx.ops.observing import Observer
from hmpx.ops.op_wrappers import Patch
from hmpx.ops.patch_table import PatchTable
from hmpx.ops.scopes import Policies
from hmpx.ops.user_functions import UserFunctions

_FAST_PATH = Flag(
    "the fast path of torch.nn.MultiheadAttention",
    torch.backends.mha.get_fastpath_enabled,
    torch.backends.mha.set_fastpath_enabled,
)
_KNOWN_SCOPES = Attribute(process_state, "known_scopes", "the scopes that are known")


class CastsOfPolicies:
    """What is made of torch as it stands, and put in its places when this is applied.

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
        """The places that had captured a function before."""
        return [capture for rebinding in self._rebindings for capture in rebinding.captures]

    @property
    def waiting(self) -> list[str]:
        """Dotted names whose module is not imported yet."""
        return self._functions.waiting

    def apply(self, changes: Changes) -> None:
        WithCaptures(self._rebindings[0], self._table, self._functions).apply(changes)
        Later(self._table.uncast, self._rebindings[0], self._know).apply(changes)
        self._tracing.apply(changes)
        self._scripting.apply(changes)
        self._beside(changes)
        if self._mapping:
            self._mapping.apply(changes)

    def further(self, changes: Changes) -> None:
        """Put in place what the policies change that have been added since, until `changes` are undone."""
        own = Changes()
        try:
            table, rebinding = self._table.further(self._policies), Rebinding()
            self._functions.further(self._policies)
            WithCaptures(rebinding, table).apply(own)
            originals = table.originals()
            self._tracing.further(originals, self._in_words())
            self._scripting.further(originals, own)
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
        if any(policy.bf16 or policy.fp32 for policy in self._policies.values()):
            changes.put(_FAST_PATH, False)  # TransformerEncoder in eval would run in one C++ call that no patch sees

    def _in_words(self) -> str:
        """In full, what the wrappers do."""
        return f"{self._policies}{self._mapping or ''}{self._kernels}"
