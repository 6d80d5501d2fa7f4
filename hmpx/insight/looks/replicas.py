"""Whether the ranks of a training still hold the same weights, and what the others have found.

Each rank writes sums of its parameters to the store by which the ranks have found each other, and the first reads
them. No collective runs, so ranks that do different things do not wait for one another. Parameters that are equal on
all ranks in the first step are replicas; parameters that differ then are parts of something.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

from hmpx.base.torch_private import AGREEMENT, private
from hmpx.insight.capture.dispatch import Look
from hmpx.insight.finding import Names, Problem, some
from hmpx.rounding.native import PLAIN
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_PATIENCE = 20  # seconds
_DO = "let DistributedDataParallel, or an all_reduce before each step, give every rank the same gradient; an optimizer "
_DO += "that rounds stochastically needs the same random numbers on all (hmpx.attach has them)"


class Replicas(Look):
    """Sums of the parameters in the first step and at the end."""

    def __init__(self) -> None:
        self._sums: dict[str, list[str]] = {"first": [], "last": []}
        self._store: Any = None
        self._rank = self._world = 0

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        distributed = torch.distributed
        if self._store is None and distributed.is_available() and distributed.is_initialized():
            self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
            compares = self._world > 1 and AGREEMENT.is_on()
            self._store = private("torch.distributed.distributed_c10d._get_default_store")() if compares else None
        self._note("first", [optimizer])

    def close(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._note("last", optimizers)

    def _note(self, when: str, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Add up the parameters, in the order of the optimizers."""
        if self._store is not None:
            self._sums[when] += [_sum(p) for each in optimizers for p in parameters(each)]

    def gathered(self, problems: list[Problem], unchecked: list[str], names: Names) -> tuple[list[Problem], list[str]]:
        """Return, on the first rank, these findings and those of the other ranks; elsewhere, these."""
        if self._store is None:
            return problems, unchecked
        own: dict[str, Any] = {
            "sums": self._sums,
            "findings": [each.as_json() for each in problems],
            "unchecked": unchecked,
        }
        self._store.set(f"hmpx/doctor/{self._rank}", json.dumps(own))
        if self._rank:
            return problems, unchecked
        found, until = {0: own}, monotonic() + _PATIENCE
        for rank in range(1, self._world):
            try:
                self._store.wait([f"hmpx/doctor/{rank}"], timedelta(seconds=max(until - monotonic(), 0.1)))
                found[rank] = json.loads(self._store.get(f"hmpx/doctor/{rank}"))
            except Exception:  # it was not asked, or is gone: torch has an own class for each store
                unchecked = [*unchecked, f"rank {rank}: it has told nothing within {_PATIENCE} seconds"]
        for rank, each in found.items():
            if rank:
                unchecked = [
                    *unchecked,
                    *(f"on rank {rank}: {said}" for said in each["unchecked"] if said not in unchecked),
                ]
                problems = [*problems, *(_of_rank(rank, one) for one in each["findings"])]
        return [*problems, *self._apart([each["sums"] for each in found.values()], names)], unchecked

    def _apart(self, ranks: Sequence[dict[str, list[str]]], names: Names) -> Iterator[Problem]:
        """Say which replicas differ."""
        columns = [each[when] for when in ("first", "last") for each in ranks]
        if len(ranks) < self._world or {len(each) for each in columns} != {len(names)}:
            return  # optimizers that came later, or differ
        sums = zip(*columns, strict=True)
        apart = tuple(
            name
            for name, each in zip(names.values(), sums, strict=True)
            if len({*each[: self._world]}) == 1 and len({*each[self._world :]}) > 1
        )
        if apart:
            said = f"{len(apart)} of {len(names)} parameters began equal on {self._world} ranks and differ now: "
            yield Problem("replicas", True, said + some(apart), _DO, names=apart, weight=0.95)


def _of_rank(rank: int, found: dict[str, Any]) -> Problem:
    """Return what another rank has found; of one kind and line, what this rank says goes before it."""
    values: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in found.items()}
    said, weight = f"on rank {rank}, {found['said']}", 0.999 * found["weight"]
    return Problem(**{**values, "said": said, "weight": weight})


def _sum(p: Parameter) -> str:
    """Return the sum of the bits of a parameter; "" for a part of one."""
    if type(p) not in PLAIN or p.layout is not torch.strided or not p.numel():
        return ""
    bits = p.detach().contiguous().view(-1).view(torch.uint8)
    places = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int32)
    return str(int((bits.int() * (places % 65521)).sum()))
