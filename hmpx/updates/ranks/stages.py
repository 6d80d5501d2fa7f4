"""Parameters whose names are those of a part of the model: a stage of a pipeline that is a `Sequential` of its own.

Rounding goes by names, so "0.weight" of the second stage gets the numbers of "0.weight" of the first, and the weights
are not those of one process. They are rounded as well as those, so it is a warning.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

import torch
import torch.distributed as dist

from hmpx.updates.gradients.accumulation import replicas
from hmpx.updates.ranks import checks
from hmpx.updates.ranks.sharding import is_sharded
from hmpx.updates.stepping.names import named

logger = logging.getLogger("hmpx")

_LOOKED_AT = 64  # names of an optimizer, so that thousands of ranks do not keep the store busy
_BARE = re.compile(r"\d+(\.|$)")  # "0.weight", or a position


def warn_of_parts(optimizer: Any, updates: Any, group: dist.ProcessGroup | None) -> None:
    """At the first step on several ranks, warn if the names seem to be those of a part of the model.

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
            "hmpx.attach(optimizer, names=[...]), and say where a slice stands, places={...}",
            type(optimizer).__name__,
            why,
        )


def _in_one_group(known: list) -> str:
    has_pipeline = "torch.distributed.pipelining" in sys.modules
    if not has_pipeline and any(p in replicas() or is_sharded(p) for _, p in known):
        return ""
    bare = [name for name, _ in known if _BARE.match(name) and (has_pipeline or not name.isdecimal())]
    return f"all ranks have a parameter {bare[0]!r}" if bare else ""


def _apart(optimizer: Any, updates: Any, known: list, group: dist.ProcessGroup) -> str:
    own = dist.get_process_group_ranks(group)
    for name, p in known[:_LOOKED_AT]:
        shape = list(updates.places[name].whole if name in updates.places else p.shape)
        rank, first = checks.first_to_say(optimizer, name, shape)
        if first != shape:
            return f"{name!r} has the shape {tuple(shape)} here and {tuple(first)} on rank {rank}"
        if rank not in own and _BARE.match(name):
            return f"this rank and rank {rank}, which is attached apart, have a parameter {name!r}"
    return ""
