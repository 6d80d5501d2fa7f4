"""Whether the ranks of a training still hold the same weights, and what the others have found.

Each rank writes sums of its parameters to the store by which the ranks have found each other, and the first reads
them. No collective runs, so ranks that do different things do not wait for one another. Parameters that are equal on
all ranks in the first step, and differ at the end, are replicas that have parted if gradients were reduced, or if no
rank has told another anything: a wrapper is missing then. Ranks may train folds of their own, or average weights now
and then.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import torch

from hmpx.base.torch_private import AGREEMENT, private
from hmpx.insight.dispatch import Look
from hmpx.insight.finding import Finding, Names, first_names
from hmpx.insight.notes import Notes
from hmpx.insight.tensors import has_numbers
from hmpx.rounding.native import PLAIN
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_PATIENCE = 20  # seconds
_numbers = itertools.count()  # of the regions of this process, as of each rank's
_DO = "let DistributedDataParallel, or an all_reduce before each step, give every rank the same gradient; an optimizer "
_DO += "that rounds stochastically needs the same random numbers on all (hmpx.attach has them)"


class Replicas(Look):
    """Sums of the parameters in the first step and at the end, and whether ranks have talked in between."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._number = next(_numbers)
        self._store: Any = None
        self.rank = self.world = 0  # of this rank, and of all
        self._groups: list[Any] = []  # of ranks, that of all the first
        self._steps = self._reduced = 0  # and those before which ranks talked, since the backward pass began
        self._silent: list[int] | None = None  # the numbers of collectives at the start
        self._now: list[int] = []

    def _heard(self) -> list[int]:
        """Return how many collectives each group has run; [] where that is unknown."""
        distributed = torch.distributed
        if not self._groups and distributed.is_available() and distributed.is_initialized():
            world = getattr(distributed.distributed_c10d, "_world", None)
            default = private("torch.distributed.distributed_c10d._get_default_group")()
            self._groups = [default, *getattr(world, "pg_map", ())]
        try:
            return [each._get_sequence_number_for_group() for each in self._groups]
        except (AttributeError, RuntimeError):  # the backend does not count, or the group is gone
            return []

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        distributed = torch.distributed
        if self._store is None and distributed.is_available() and distributed.is_initialized():
            self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
            compares = self.world > 1 and AGREEMENT.is_on()
            self._store = private("torch.distributed.distributed_c10d._get_default_store")() if compares else None
        if self._store is not None:
            self._first += _sums([optimizer])

    def loss(self, notes: Notes, losses: Sequence[torch.Tensor]) -> None:
        self._now = self._heard()
        self._silent = self._silent or self._now

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        now = self._heard()
        self._steps += 1
        self._reduced += now[:1] > self._now[:1]  # in the group of all ranks
        self._now = now

    def gathered(
        self,
        findings: list[Finding],
        unchecked: list[str],
        names: Names,
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> tuple[list[Finding], list[str]]:
        """Return, on the first rank, these findings and those of the other ranks; elsewhere, these."""
        if self._store is None:
            return findings, unchecked
        last = self._heard() or self._now
        own: dict[str, Any] = {
            "sums": {"first": self._first, "last": _sums(optimizers)},
            "is_reduced": 2 * self._reduced > self._steps,
            "is_silent": last == self._silent,
            "findings": [each.as_json() for each in findings],
            "unchecked": unchecked,
        }
        self._store.set(f"hmpx/doctor/{self._number}/{self.rank}", json.dumps(own))
        if self.rank:
            return findings, unchecked
        found, until = {0: own}, monotonic() + _PATIENCE
        for rank in range(1, self.world):
            try:
                key = f"hmpx/doctor/{self._number}/{rank}"
                self._store.wait([key], timedelta(seconds=max(until - monotonic(), 0.1)))
                found[rank] = json.loads(self._store.get(key))
            except Exception:  # it was not asked, or is gone: torch has an own class for each store
                unchecked = [*unchecked, f"rank {rank}: it has told nothing within {_PATIENCE} seconds"]
        for rank, each in found.items():
            if rank:
                unchecked = [
                    *unchecked,
                    *(f"on rank {rank}: {said}" for said in each["unchecked"] if said not in unchecked),
                ]
                findings = [*findings, *(_of_rank(rank, one) for one in each["findings"])]
        return [*findings, *self._apart([*found.values()], names)], unchecked

    def _apart(self, ranks: Sequence[dict[str, Any]], names: Names) -> Iterator[Finding]:
        columns = [each["sums"][when] for when in ("first", "last") for each in ranks]
        if len(ranks) < self.world or {len(each) for each in columns} != {len(names)}:
            return  # optimizers that came later, or differ
        sums = zip(*columns, strict=True)
        apart = tuple(
            name
            for name, each in zip(names.values(), sums, strict=True)
            if len({*each[: self.world]}) == 1 and len({*each[self.world :]}) > 1
        )
        if apart:
            said = f"{len(apart)} of {len(names)} parameters began equal on {self.world} ranks and differ now: "
            said += first_names(apart)
            wrong, do = all(each["is_reduced"] for each in ranks) or all(each["is_silent"] for each in ranks), _DO
            if not wrong:
                said += "; between backward pass and step the ranks told each other nothing"
                do = f"nothing, if each rank is to train weights of its own for a while; else {_DO}"
            yield Finding("replicas", wrong, said, do, names=apart, weight=0.95 if wrong else 0.1)


def _of_rank(rank: int, found: dict[str, Any]) -> Finding:
    """Return what another rank has found; of one kind and line, what this rank says goes before it."""
    values: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in found.items()}
    said, weight = f"on rank {rank}, {found['said']}", 0.999 * found["weight"]
    return Finding(**{**values, "said": said, "weight": weight})


def _sums(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    return [_sum(p) for each in optimizers for p in parameters(each)]


def _sum(p: Parameter) -> str:
    """Return the sum of the bits of a parameter; "" for a part of one, and for one whose memory was freed."""
    if type(p) not in PLAIN or p.layout is not torch.strided or not p.numel() or not has_numbers(p):
        return ""
    bits = p.detach().contiguous().view(-1).view(torch.uint8)
    positions = torch.arange(1, bits.numel() + 1, device=bits.device, dtype=torch.int32)
    return str(int((bits.int() * (positions % 65521)).sum()))
