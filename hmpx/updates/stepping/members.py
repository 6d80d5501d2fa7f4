"""The BF16 parameters of an optimizer as segments: their names, where they stand in the whole, what shares memory.

Parameters that share elements in memory (one weight under two names, or views of one buffer that overlap) must be
updated one after the other, or the second update would undo the first. Views of one buffer that do not overlap (a fused
projection that is cut in three) share no element and are updated like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hmpx.errors import HmpxError
from hmpx.rounding.dataless import lacks_data
from hmpx.rounding.xla import is_lazy
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.settings import Settings
from hmpx.updates.ranks.sharding import Box, Place, box_of, local, placed
from hmpx.updates.stepping.names import named

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class Members:
    """The segment of each BF16 parameter of an optimizer, whole, and the index of each parameter's group."""

    def __init__(self, optimizer: Optimizer, segments: list[Segment]) -> None:
        self.whole = {segment.param: segment for segment in segments}
        self.group = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.elements = sum([local(p).numel() for p in self.group])


class BF16Parameters:
    """Finds the BF16 parameters of one optimizer.

    Attributes:
        names: those that `attach` was given, by parameter.
        places: where parameters stand that are slices of larger ones, by name.
    """

    def __init__(self, settings: Settings, names: dict[Parameter, str], places: dict[str, Place]) -> None:
        self._settings, self.names, self.places = settings, names, places
        self._overlaps = Overlaps()

    def segments(self, optimizer: Optimizer) -> list[Segment]:
        """Return a segment for each of them, whole."""
        ours = self.named(optimizer)
        with torch.no_grad():
            shared = self._overlaps.among([p for _, p in ours])
            return [self._segment(p, name, shared.get(p)) for name, p in ours]

    def named(self, optimizer: Optimizer) -> list[tuple[str, Parameter]]:
        """Return them with their names."""
        return [(name, p) for name, p in named(optimizer, self.names) if p.dtype is torch.bfloat16]

    def every(self, optimizer: Optimizer) -> list[Segment]:
        """Return a segment for each parameter of any dtype: masters may come before their parameter is BF16."""
        return [Segment(p, name, way=self._settings.way(name)) for name, p in named(optimizer, self.names)]

    def _segment(self, p: Parameter, name: str, overlaps: Parameter | None) -> Segment:
        if getattr(p, "_fsdp_flattened", False):
            raise HmpxError(
                f"parameter {name!r} belongs to FullyShardedDataParallel (FSDP1), which flattens parameters into one "
                "and hides where an element belongs; shard the model with torch.distributed.fsdp.fully_shard"
            )
        return Segment(p, name, box=self._box(p, name), overlaps=overlaps, way=self._settings.way(name))

    def _box(self, p: Parameter, name: str) -> Box | None:
        place = self.places.get(name)
        if place is None:
            return box_of(p, name)
        if self._settings.way(name).state_dtype == "8bit" and (p.dim() == 1 or place.whole[1:] != p.shape[1:]):
            raise HmpxError(
                f"places: {name!r} is cut across rows, which in 8 bits share scales with other ranks: give it "
                "state_dtype=torch.bfloat16, or shard it as a DTensor"
            )
        return placed(p, name, place)


def refuse_overlaps(segments: Sequence[Segment]) -> None:
    """Raise if parameters share elements: for steps that read all weights before writing one, or that have masters."""
    for segment in segments:
        if segment.overlaps is not None:
            other = next(each.name for each in segments if each.param is segment.overlaps)
            raise HmpxError(
                f"parameters {segment.name!r} and {other!r} share memory, and each update would undo the other: "
                "give the optimizer one of them"
            )


class Overlaps:
    """Finds which parameters of one optimizer share elements, again only after one has moved in memory."""

    def __init__(self) -> None:
        self._places: list[tuple] = []
        self._found: dict[Parameter, Parameter] = {}

    def among(self, params: Sequence[Parameter]) -> dict[Parameter, Parameter]:
        """Return each parameter that shares an element with another one, with that one; needs `torch.no_grad()`."""
        held = {p: local(p) for p in params if not is_lazy(p) and not lacks_data(p)}
        places = [(id(p), tensor.data_ptr(), tensor.shape, tensor.stride()) for p, tensor in held.items()]
        if places != self._places:
            by_storage: dict[int, dict[Parameter, Tensor]] = {}
            for p, tensor in held.items():
                if tensor.numel():
                    by_storage.setdefault(tensor.untyped_storage().data_ptr(), {})[p] = tensor
            self._found = {}
            for views in by_storage.values():
                if len(views) > 1:
                    self._found |= _sharing(views)
            self._places = places
        return self._found


def _sharing(views: dict[Parameter, Tensor]) -> dict[Parameter, Parameter]:
    """Mark the elements of each view in a map of the storage; a view that meets a mark shares elements."""
    found: dict[Parameter, Parameter] = {}
    first, *_ = views.values()
    owner = torch.zeros(first.untyped_storage().nbytes() // first.element_size(), dtype=torch.int32)
    params = list(views)
    for number, (p, view) in enumerate(views.items(), 1):
        here = owner.as_strided(view.shape, view.stride(), view.storage_offset())
        for before in here.unique().tolist():
            if before:
                other = params[before - 1]
                found |= {p: other, other: p}
        here.fill_(number)
    return found
