"""Whether the ranks of a training still hold the same weights.

Each rank writes sums of its parameters to the store by which the ranks have found each other, and the first reads
them. No collective runs, so ranks that do different things do not wait for one another. Parameters that are equal on
all ranks in the first step are replicas; parameters that differ then are parts of something.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch

from hmpx.insight.doctor.diagnosis import Problem, some
from hmpx.rounding.native import PLAIN

Parameter = torch.nn.Parameter
_PATIENCE = timedelta(seconds=20)
_DO = "let DistributedDataParallel, or an all_reduce before each step, give every rank the same gradient; an optimizer "
_DO += "that rounds stochastically needs the same random numbers on all (hmpx.attach has them)"


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
            self._store = distributed.distributed_c10d._get_default_store() if self._world > 1 else None
        if self._store is not None:
            self._sums[when] += [_sum(p) for p in params]

    def problems(self, names: Mapping[Parameter, str]) -> Iterator[Problem]:
        """On the first rank, say which replicas differ."""
        if self._store is None or not self._sums["first"]:
            return
        self._store.set(f"hmpx/doctor/{self._rank}", json.dumps(self._sums))
        keys = [f"hmpx/doctor/{rank}" for rank in range(self._world)]
        try:
            self._store.wait(keys if self._rank == 0 else keys[:0], _PATIENCE)
        except Exception:  # a rank that was not asked, or is gone: torch has an own class for each store
            return
        ranks = [json.loads(self._store.get(key)) for key in keys] if self._rank == 0 else []
        columns = [each[when] for when in ("first", "last") for each in ranks]
        if {len(each) for each in columns} != {len(names)}:
            return  # the other ranks; optimizers that came later, or differ
        sums = zip(*columns, strict=True)
        apart = tuple(
            name
            for name, each in zip(names.values(), sums, strict=True)
            if len({*each[: self._world]}) == 1 and len({*each[self._world :]}) > 1
        )
        if apart:
            said = f"{len(apart)} of {len(names)} parameters began equal on {self._world} ranks and differ now: "
            yield Problem("replicas", True, said + some(apart), _DO, names=apart, weight=0.95)


def _sum(p: Parameter) -> str:
    """Return the sum of the bits of a parameter; "" for a part of one."""
    if type(p) not in PLAIN or p.layout is not torch.strided or not p.numel():
        return ""
    bits = p.detach().contiguous().view(-1).view(torch.uint8)
    places = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int32)
    return str(int((bits.int() * (places % 65521)).sum()))
