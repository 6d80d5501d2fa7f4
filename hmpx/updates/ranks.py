"""Ranks of one job compare facts that must be equal on all of them, through the job's key-value store.

The store is the one in which `torch.distributed.init_process_group` met. It needs no collective, device or process
group, so a rank may read it at any time and no other rank has to answer. Two things are written to it:

- when an optimizer is attached, the facts of the first rank; every other rank compares itself with them, and all wait
  until they agree;
- seed and number of the 1st, 2nd, 4th, 8th ... step after that, compared likewise, which finds a rank that alone has
  loaded a checkpoint.
"""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hmpx.base.torch_private import private
from hmpx.errors import HmpxError

_PATIENCE = timedelta(minutes=5)  # with which ranks wait for each other; less where the job's own timeout is less

_compared: Counter[tuple] = Counter()  # how often each set of ranks has compared in this store
_met: weakref.ref | None = None  # the process group that it belongs to


def in_job() -> bool:
    """Whether this process is a rank, perhaps the only one."""
    return dist.is_available() and dist.is_initialized()


def several_ranks() -> bool:
    return in_job() and dist.get_world_size() > 1


def _store() -> dist.Store:
    global _met
    if _met is None or _met() is not dist.group.WORLD:
        _met = weakref.ref(dist.group.WORLD)
        _compared.clear()
    return private("torch.distributed.distributed_c10d._get_default_store")()


def compare(what: str, facts: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of `group` (None: all) if `facts`, which must be JSON, differ on one, or one has refused.

    Every rank of the group calls this, or `refuse`, as often as the first, and waits for the others.
    """
    ranks = _together(group)
    if ranks:
        store, key = _store(), _next_key(ranks)
        store.set(_here(key, dist.get_rank()), "")
        _compare_with_first(store, key, what, facts, ranks)
        if store.add(f"{key}/agreed", 1) == len(ranks):
            store.set(f"{key}/end", "")
        _wait(store, key, "/end", what, ranks)
        if message := store.get(f"{key}/end").decode():
            raise HmpxError(message)


def refuse(what: str, error: Exception, group: dist.ProcessGroup | None = None) -> None:
    """Call instead of `compare` on a rank that cannot go on: the other ranks raise at once."""
    ranks = _together(group)
    if ranks:
        store, key = _store(), _next_key(ranks)
        store.set(f"{key}/end", f"{what} was refused on rank {dist.get_rank()}: {error}")
        if dist.get_rank() == ranks[0]:
            store.set(key, json.dumps(None))


def _together(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of a group that this one belongs to; none if there is no other one."""
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD)) if several_ranks() else ()
    return ranks if len(ranks) > 1 and dist.get_rank() in ranks else ()


def _next_key(ranks: tuple[int, ...]) -> str:
    _compared[ranks] += 1
    return f"hmpx/compare/{','.join(map(str, ranks))}/{_compared[ranks]}"


def _here(key: str, rank: int) -> str:
    return f"{key}/rank {rank}"


def _wait(store: dist.Store, key: str, part: str, what: str, ranks: tuple[int, ...]) -> None:
    patience = min(_PATIENCE, getattr(store, "timeout", _PATIENCE))
    try:
        store.wait([key + part], patience)
    except RuntimeError:  # torch's DistStoreError is one
        raise HmpxError(
            f"{what}: {_absent(store, key, ranks)} did not get there within {patience.total_seconds():.0f} s, and has "
            "ended or waits elsewhere; if only some ranks hold this optimizer, give process_group="
        ) from None


def _absent(store: dist.Store, key: str, ranks: tuple[int, ...]) -> str:
    try:
        absent = [rank for rank in ranks if not store.check([_here(key, rank)])]
    except RuntimeError:
        return "the rank that holds the store of the job"
    return f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}" if absent else "another rank"


def _compare_with_first(store: dist.Store, key: str, what: str, facts: dict[str, Any], ranks: tuple[int, ...]) -> None:
    if dist.get_rank() == ranks[0]:
        store.set(key, json.dumps(facts))
        return
    _wait(store, key, "", what, ranks)
    theirs = json.loads(store.get(key))
    if theirs is None:  # it has refused, and says so at the end
        return
    ours = json.loads(json.dumps(facts))
    difference = next(_differences(ours, theirs), None)
    if difference is not None:
        message = f"{what}: rank {dist.get_rank()} differs from rank {ranks[0]}: {difference}"
        if "parameter" in difference:
            message += "; ranks that hold other parameters, as stages of a pipeline do, each want a process_group="
        store.set(f"{key}/end", message)
        raise HmpxError(message)


def _differences(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Yield each difference in words, in the order of the facts."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in [*ours, *(key for key in theirs if key not in ours)]:
            yield from _differences(ours.get(key), theirs.get(key), f"{at}'s {key}" if at else key)
    elif ours != theirs:
        yield f"{at} is {ours!r}, not {theirs!r}"
