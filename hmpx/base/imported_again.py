"""Lets a process import hmpx again after its modules were deleted from `sys.modules`, as notebooks do.

Nothing that an earlier import has put in force may stand in torch then: the new modules would not know of it, and
convert what is converted. `torch.ops.hmpx`, which stays as long as the process, remembers the earlier import.
"""

from __future__ import annotations

from types import ModuleType

import torch

from hmpx.errors import HmpxError

REMEMBERED = vars(torch.ops.hmpx)


def remember(process_state: ModuleType, step_hooks: ModuleType) -> None:
    """Remember what tells whether anything of this import is in force.

    Raises:
        HmpxError: something of an earlier import is.
    """
    state, steps = (REMEMBERED.get(name) for name in ("process_state", "step_hooks"))
    if state is not process_state and state and steps:
        steps.uninstall()
        if state.in_use() or steps.is_needed():
            raise HmpxError(
                "hmpx is imported again, and what an earlier import has put in force stands in torch. End that with "
                "the earlier module (hmpx.restore(), hmpx.detach(optimizer), rule.remove()), or start a new process"
            )
    REMEMBERED.update(process_state=process_state, step_hooks=step_hooks)
