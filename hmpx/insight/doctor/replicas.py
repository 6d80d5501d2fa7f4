"""Whether the ranks of a training still hold the same weights.

Each rank writes sums of its parameters to the store by which the ranks have found each other, and the first reads
them. No collective runs, so that ranks which do different things do not wait for one another. Parameters that are equal
on all ranks in the first step are replicas; those that differ then are parts of something.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from hmpx.insight.doctor.diagnosis import Problem, some
from hmpx.updates.ranks.sharding import PLAIN

Parameter = torch.nn.Parameter
_PATIENCE = timedelta(seconds=20)


class Replicas:
    """Sums of the parameters in the first step and at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, list[str]] = {"first": [], "last": []}
        self._store: Any = None
        self._rank = self._world = 0

    def note(self, when: str, params: Iterable[Parameter]) -> None:
        """Add up these parameters, in the order of the optimizers."""
        distributed = torch.distributed
        if self._store is None and distributed.is_available() and distributed.is_initialized():
            self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
            if self._world > 1:
                self._store = distributed.distributed_c10d._get_default_store()
        if self._store is not None:
            self._sums[when] += [_sum(p) for p in params]

    def problems(self, names: Mapping[Parameter, str]) -> Iterator[Problem]:
        """On the first rank, that replicas differ."""
        if self._store is None or not self._sums["first"]:
            return
        self._store.set(f"hmpx/doctor/{self._rank}", json.dumps(self._sums))
        if self._rank:
            return
        keys = [f"hmpx/doctor/{rank}" for rank in range(self._world)]
        try:
            self._store.wait(keys, _PATIENCE)
        except Exception:  # a rank that was not asked, or is gone: torch has an own class for each store
            return
        ranks = [json.loads(self._store.get(key)) for key in keys]
        first, last = ([each[when] for each in ranks] for when in ("first", "last"))
        if {len(each) for each in (*first, *last)} != {len(names)}:
            return  # optimizers that came later, or differ
        columns = zip(names.values(), zip(*first, strict=True), zip(*last, strict=True), strict=True)
        apart = tuple(name for name, before, now in columns if len(set(before)) == 1 and len(set(now)) > 1)
        if apart:
            yield Problem(
                "replicas",
                True,
                f"{len(apart)} of {len(names)} parameters began equal on {self._world} ranks and differ now: "
                f"{some(apart)}",
                "let DistributedDataParallel, or an all_reduce before each step, give every rank the same gradient; "
                "an optimizer that rounds stochastically needs the same random numbers on all (hmpx.attach has them)",
                names=apart,
                weight=0.95,
            )


def _sum(p: Parameter) -> str:
    """The sum of the bits of a parameter; none of a part of one."""
    if type(p) not in PLAIN or p.layout is not torch.strided or not p.numel():
        return ""
    bits = p.detach().contiguous().view(-1).view(torch.uint8)
    places = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int32)
    return str(int((bits.int() * (places % 65521)).sum()))
