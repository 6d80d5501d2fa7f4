"""Checks that seed and step number, from which the rounding is made, are equal on every rank of an optimizer.

They are compared at the 1st, 2nd, 4th, 8th ... step, which finds a rank that alone has loaded a checkpoint: of an
attached optimizer, and where a `disable_casts` region steps the parameters of a DistributedDataParallel module. Under
`torch.distributed.algorithms.Join` some ranks step less often than others, so it is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.optim import Optimizer

from hmpx.base.changes import Attribute, Changes
from hmpx.base.torch_private import JOINS
from hmpx.errors import HmpxError
from hmpx.updates.gradients import is_claimed
from hmpx.updates.ranks import checks
from hmpx.updates.ranks.ddp import replicas
from hmpx.updates.stepping.names import parameters

_in_regions: WeakKeyDictionary[Optimizer, StepCounts | None] = WeakKeyDictionary()


class StepCounts:
    """The comparisons of one optimizer.

    Args:
        group: the process group of the ranks that hold it; None for all.
        since: from when on its steps are counted.
    """

    def __init__(self, group: Any, since: str = "hmpx.attach") -> None:
        self._group, self._since, self._steps = group, since, 0

    def compare(self, optimizer: Optimizer, updates: Any, seed: int | None = None) -> None:
        """Compare before a step; `seed` is that of the region around it.

        Raises:
            HmpxError: seed or step number are not those of the first rank.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) or not checks.several_ranks():  # no power of two
            return
        key = updates.rounding_key(optimizer, seed)
        what = f"step {self._steps} of {type(optimizer).__name__} since {self._since}"
        checks.compare(what, {"seed": key.seed, "step": key.step}, self._group)


def compare_in_region(optimizer: Optimizer, updates: Any, seed: int | None) -> None:
    """Compare before a step in a region, over the ranks whose gradients a DistributedDataParallel module reduces."""
    if checks.several_ranks():
        if optimizer not in _in_regions:
            reduced = replicas()
            module = next((reduced[p] for p in parameters(optimizer) if p in reduced), None)
            counts = None if module is None else StepCounts(module.process_group, "its first in a region")
            _in_regions[optimizer] = counts
        counts = _in_regions[optimizer]
        if counts is not None:
            counts.compare(optimizer, updates, seed)


def watch_joins(changes: Changes) -> None:
    """Refuse every `Join` of parameters that an attached optimizer steps, until `changes` are undone."""
    if dist.is_available() and JOINS.is_on():
        from torch.distributed.algorithms.join import Join

        changes.put(
            Attribute(Join, "__enter__", "torch.distributed.algorithms.Join.__enter__"), _entering(Join.__enter__)
        )


def _entering(enter: Callable) -> Callable:
    @functools.wraps(enter)
    def entering(join: Any) -> Any:
        if join._enable and any(map(_is_attached, join._joinables)):
            raise HmpxError(
                "torch.distributed.algorithms.Join: ranks with fewer batches step less often than others, and the "
                "rounding of an attached optimizer depends on the number of the step: give every rank as many batches "
                "(drop_last=True of the sampler), or detach the optimizer"
            )
        return enter(join)

    return entering


def _is_attached(joinable: Any) -> bool:
    return is_claimed(parameters(joinable) if isinstance(joinable, Optimizer) else joinable.parameters())
