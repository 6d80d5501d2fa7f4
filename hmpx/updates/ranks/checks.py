"""Ranks of one job check, through the job's key-value store, what must be the same on all of them.

The store is the one in which `torch.distributed.init_process_group` met. It needs no collective, device or process
group, so a rank may read it at any time and no other rank has to answer. Two things are written to it:

- when an optimizer is attached, what the first rank has attached; every other rank compares itself with that;
- when a step fails on one rank, that it failed. Every rank looks before its next step. The news is there by then: both
  ranks have taken part in a collective of the backward pass that came between.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hmpx.errors import HmpxError

_PATIENCE = timedelta(minutes=5)  # between the first rank's `attach` and another's

_compared: Counter[tuple] = Counter()  # how often each set of ranks has compared in this store
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of optimizers, by their first step
_met: weakref.ref | None = None  # the process group that the two above belong to


def in_job() -> bool:
    """Whether this process is a rank, perhaps the only one."""
    return dist.is_available() and dist.is_initialized()


def several_ranks() -> bool:
    """Whether there is another rank."""
    return in_job() and dist.get_world_size() > 1


def _store() -> dist.Store:
    global _met
    if _met is None or _met() is not dist.group.WORLD:
        _met = weakref.ref(dist.group.WORLD)
        _compared.clear()
        _numbers.clear()
    return dist.distributed_c10d._get_default_store()


def compare(what: str, facts: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise if `facts`, which must be JSON, differ from those of the first rank of `group` (None: of all ranks).

    Every rank of the group must call this as often as the first. A difference makes the next step of every rank raise.
    """
    if not several_ranks():
        return
    store, ranks = _store(), tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    if dist.get_rank() not in ranks or len(ranks) == 1:
        return
    _compared[ranks] += 1
    key = f"hmpx/compare/{','.join(map(str, ranks))}/{_compared[ranks]}"
    if dist.get_rank() == ranks[0]:
        store.set(key, json.dumps(facts))
        return
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:  # torch's DistStoreError is one
        raise HmpxError(
            f"{what}: rank {ranks[0]} has done nothing like it within {_PATIENCE.total_seconds():.0f} s; "
            "if only some ranks hold this optimizer, give process_group="
        ) from None
    theirs = json.loads(store.get(key))
    ours = json.loads(json.dumps(facts))
    difference = next(_differences(ours, theirs), None)
    if difference is not None:
        message = f"{what}: rank {dist.get_rank()} differs from rank {ranks[0]}: {difference}"
        store.set("hmpx/different", message)
        store.set("hmpx/news", "")
        raise HmpxError(message)


def _differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Each difference in words, in the order of the facts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            yield from _differences(ours.get(key), theirs.get(key), f"{at}'s {key}" if at else key)
    elif ours != theirs:
        yield f"{at} is {ours!r}, not {theirs!r}"


def report_failure(optimizer: Any, step: int, error: Exception) -> None:
    """Tell the other ranks that the step failed on this one, whose weights are as they were."""
    if several_ranks():
        store, place = _store(), _place(optimizer)
        what = f"{type(error).__name__}: {error}"[:500]
        told = f"step {step} of {type(optimizer).__name__} failed on rank {dist.get_rank()} ({what})"
        store.set(f"{place}/told", json.dumps([step, told]))
        store.add(f"{place}/{step}", 1)
        store.set("hmpx/news", "")


def check_failures(optimizer: Any, step: int) -> None:
    """Raise if this rank has taken a step that failed on another one, or if `compare` has found a difference."""
    if not several_ranks():
        return
    store, place = _store(), _place(optimizer)
    if not store.check(["hmpx/news"]):
        return
    if store.check(["hmpx/different"]):
        raise HmpxError(store.get("hmpx/different").decode())
    if not store.check([f"{place}/told"]):
        return
    failed, told = json.loads(store.get(f"{place}/told"))
    if failed < step and store.add(f"{place}/{failed}", 0) % dist.get_world_size():
        raise HmpxError(
            f"{told} and was taken back there; this rank has taken it, so their weights differ by one step: "
            "go back to a checkpoint"
        )


def _place(optimizer: Any) -> str:
    """The key of this optimizer's failures. Ranks of one program take the first steps of optimizers in one order."""
    return f"hmpx/failed/{_numbers.setdefault(optimizer, len(_numbers))}"
