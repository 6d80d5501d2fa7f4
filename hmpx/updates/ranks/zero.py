"""ZeroRedundancyOptimizer (ZeRO-1): each rank steps its own parameters, then all of them are broadcast.

hmpx works on the optimizer inside, which holds the parameters of one rank; the outer one broadcasts their values.
Parameters have the names of the outer one, because positions in the inner one differ from rank to rank.

Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter models" (SC 2020).
"""

from __future__ import annotations

import contextlib
import sys

from torch.optim import Optimizer

from hmpx.errors import HmpxError
from hmpx.updates.checkpoints import Checkpoints
from hmpx.updates.stepping import names


def inner(optimizer: Optimizer) -> Optimizer | None:
    """Return the optimizer that steps this rank's parameters; None if `optimizer` is no ZeroRedundancyOptimizer."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return None
    if optimizer._overlap_with_ddp:
        raise HmpxError(
            "ZeroRedundancyOptimizer(overlap_with_ddp=True) steps in functions of its own, which hmpx does not see; "
            "leave overlap_with_ddp out"
        )
    return optimizer.optim


def share_names(outer: Optimizer) -> None:
    """Let the optimizer inside know the names of its parameters, or their positions, in `outer`."""
    held = inner(outer)
    assert held is not None
    names.share(outer, held)


def watch_loads(outer: Optimizer, checkpoints: Checkpoints, undo: contextlib.ExitStack) -> None:
    """Take masters out of a load, which gives the inner optimizer its state without running its hooks.

    `undo` removes the hook.
    """

    def loaded(outer: Optimizer) -> None:
        held = inner(outer)
        assert held is not None
        checkpoints.take_from_state(held)
        outer.state.clear()  # a second copy, which nothing reads

    undo.callback(outer.register_load_state_dict_post_hook(loaded).remove)
