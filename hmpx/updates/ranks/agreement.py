"""Checks that seed and step number, from which the rounding is made, are equal on every rank of an optimizer.

They are compared at the 1st, 2nd, 4th, 8th ... step, which finds a rank that alone has loaded a checkpoint: of an
attached optimizer, and where a `disable_casts` region steps the parameters of a DistributedDataParallel module. Under
`torch.distributed.algorithms.Join` a rank that has no more batches steps less often than the others, whose weights it
is given at the end; its number then becomes theirs.

Rounding goes by names, so a stage of a pipeline that is a `Sequential` of its own, whose "0.weight" gets the numbers of
the first stage's "0.weight", has other weights than in one process. They are rounded as well as those, so this is a
warning, at the first step.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from hmpx.base.changes import Attribute, Changes
from hmpx.errors import HmpxError
from hmpx.updates.ranks import checks
from hmpx.updates.ranks.ddp import replicas
from hmpx.updates.ranks.sharding import is_sharded
from hmpx.updates.stepping import step_count
from hmpx.updates.stepping.names import named, parameters
from hmpx.updates.stepping.step_count import STEP_KEY

logger = logging.getLogger("hmpx")

_counting: WeakKeyDictionary[Optimizer, StepCounts] = WeakKeyDictionary()  # in one order on all ranks
_in_regions: WeakKeyDictionary[Optimizer, StepCounts | None] = WeakKeyDictionary()
_joins: list[Any] = []  # that are open
_LOOKED_AT = 64  # names of an optimizer, so that thousands of ranks do not keep the store busy
_BARE = re.compile(r"\d+(\.|$)")  # "0.weight", or a position


class StepCounts:
    """The comparisons of one optimizer.

    Args:
        group: the process group of the ranks that hold it; None for all.
        since: from when on its steps are counted.
        warns: whether the first step warns of names that seem to be those of a part of the model.
    """

    def __init__(self, group: Any, since: str = "hmpx.attach", *, warns: bool = False) -> None:
        self._group, self._since, self._steps, self._joins, self._warns = group, since, 0, 0, warns
        self._name = ""  # the same on every rank, from the first step on

    def compare(self, optimizer: Optimizer, updates: Any, seed: int | None = None) -> None:
        """Compare before a step; `seed` is that of the region around it.

        Raises:
            HmpxError: seed or step number are not those of the first rank.
        """
        self._steps += 1
        if self._steps & (self._steps - 1) or not checks.several_ranks():  # no power of two
            return
        self._name = self._name or checks.next_name(self._group)
        _counting[optimizer] = self
        if self._warns:
            self._warns = False
            _warn_of_parts(optimizer, updates, self._group)
        if not _joins:  # in which some ranks step less often
            key = updates.rounding_key(optimizer, seed)
            what = f"step {self._steps} of {type(optimizer).__name__} since {self._since}"
            try:
                checks.check_failures(optimizer, key.step)
            except HmpxError as error:
                checks.refuse(what, error, self._group)
                raise
            checks.compare(what, {"seed": key.seed, "step": key.step}, self._group)

    def join(self, optimizer: Optimizer) -> None:
        """Take over the largest step number, and begin comparing anew."""
        self._joins, self._steps = self._joins + 1, 0
        own = step_count.stored(optimizer).get(STEP_KEY, 0)
        number = checks.largest(f"{self._name}/{self._joins}", own, self._group)
        if number != own:
            step_count.keep(optimizer, **{STEP_KEY: number})


def compare_in_region(optimizer: Optimizer, updates: Any, seed: int | None) -> None:
    """Compare before a step in a region, over the ranks whose gradients a DistributedDataParallel module reduces."""
    if checks.several_ranks():
        if optimizer not in _in_regions:
            reduced = replicas()
            module = next((reduced[p] for p in parameters(optimizer) if p in reduced), None)
            counts = None if module is None else StepCounts(module.process_group, "its first in a region")
            _in_regions[optimizer] = counts
            if counts is None:
                _warn_of_parts(optimizer, updates, None)
        counts = _in_regions[optimizer]
        if counts is not None:
            counts.compare(optimizer, updates, seed)


def _warn_of_parts(optimizer: Optimizer, updates: Any, group: dist.ProcessGroup | None) -> None:
    """Warn if the names of parameters seem to be those of a part of the model.

    They do where ranks that are attached apart have other shapes by the same name, or the same name that begins with
    an index; and where all ranks have such names, and neither DistributedDataParallel nor a DTensor shows that they
    hold one model, or a pipeline is in use.
    """
    known = [(name, p) for name, p in named(optimizer, updates.names) if p.dtype is torch.bfloat16]
    why = _in_one_group(known) if group is None else _apart(optimizer, updates, known, group)
    if why:
        logger.warning(
            "hmpx: %s: %s. Rounding goes by names, so if this rank trains a stage of a pipeline or a slice of larger "
            "parameters, its weights are not those of one process. Give each parameter its name in the whole model, "
            "hmpx.attach(optimizer, names=[...])",
            type(optimizer).__name__,
            why,
        )


def _in_one_group(known: list) -> str:
    has_pipeline, reduced = "torch.distributed.pipelining" in sys.modules, replicas()
    if not has_pipeline and any(p in reduced or is_sharded(p) for _, p in known):
        return ""
    bare = [name for name, _ in known if _BARE.match(name) and (has_pipeline or not name.isdecimal())]
    return f"all ranks have a parameter {bare[0]!r}" if bare else ""


def _apart(optimizer: Optimizer, updates: Any, known: list, group: dist.ProcessGroup) -> str:
    own = dist.get_process_group_ranks(group)
    for name, p in known[:_LOOKED_AT]:
        shape = list(p.shape)
        rank, first = checks.first_to_say(optimizer, name, shape)
        if first != shape:
            return f"{name!r} has the shape {tuple(shape)} here and {tuple(first)} on rank {rank}"
        if rank not in own and _BARE.match(name):
            return f"this rank and rank {rank}, which is attached apart, have a parameter {name!r}"
    return ""


def watch_joins(changes: Changes) -> None:
    """Let ranks agree on the number at the end of every `Join`, until `changes` are undone."""
    if dist.is_available():
        from torch.distributed.algorithms.join import Join

        for name, wrapped in (("__enter__", _opening(Join.__enter__)), ("__exit__", _agreeing(Join.__exit__))):
            changes.put(Attribute(Join, name, f"torch.distributed.algorithms.Join.{name}"), wrapped)


def _opening(enter: Callable) -> Callable:
    @functools.wraps(enter)
    def opening(self: Any) -> Any:
        _joins.append(self)
        return enter(self)

    return opening


def _agreeing(leave: Callable) -> Callable:
    @functools.wraps(leave)
    def agreeing(self: Any, kind: Any, value: Any, traceback: Any) -> None:
        try:
            leave(self, kind, value, traceback)
        finally:
            _joins[:] = [each for each in _joins if each is not self]
        if kind is None:
            for optimizer, counts in list(_counting.items()):
                counts.join(optimizer)

    return agreeing
