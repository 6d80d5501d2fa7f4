"""Parameters that share elements in memory: one weight under two names, or views of one buffer that overlap.

They must be updated one after the other, or the second update would undo the first. Views of one buffer that do not
overlap (a fused projection that is cut in three) share no element and are updated like any others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hmpx.errors import HmpxError
from hmpx.rounding.dataless import lacks_data
from hmpx.rounding.xla import is_lazy
from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


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
    """Which parameters of one optimizer share elements; searched again only after one has moved in memory."""

    def __init__(self) -> None:
        self._places: list[tuple] = []
        self._found: dict[Parameter, Parameter] = {}

    def among(self, params: Sequence[Parameter]) -> dict[Parameter, Parameter]:
        """Each parameter that shares an element with another one, with that one; needs `torch.no_grad()`."""
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
