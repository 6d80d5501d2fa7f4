"""Casts whose results are not used, or only cast back: FP32 that was asked for and did not happen, a detour."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from hmpx.insight.doctor.lineage import VIEWS, Marks
from hmpx.insight.doctor.spots import Spot, Spots
from hmpx.insight.tensors import LOW, Tensor
from hmpx.insight.tensors import name as dtype_name

Parameter = torch.nn.Parameter
_WIDE = torch.float32


@dataclass
class _Asked:
    """A parameter in low precision that was cast to FP32 before the training began."""

    parameter: weakref.ref[Parameter]
    result: weakref.ref[Tensor]
    spot: Spot
    used: bool = False
    lowered: bool = False  # cast down again since, by hand


class CastsByHand:
    """Follows what a cast has made to the ops that read it. `spots` of kind "cast up" and "cast down" count these."""

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._made = Marks[tuple[torch.dtype, Spot]]()  # the dtype before, and where
        self._last: tuple[weakref.ref[Tensor], Spot] | None = None
        self._asked: list[_Asked] = []

    def follow(
        self, name: str, given: list[Tensor], results: list[Tensor], frame: types.FrameType, leave: bool
    ) -> None:
        """One op. leave: of a backward pass or a step, in which no cast is followed."""
        if self._last is not None:
            result, spot = self._last
            spot.add(dropped=result() is None)
            self._last = None
        is_cast = _is_cast(name, given, results)
        for tensor in given:
            if name == "detach" or (cast := self._made.get(tensor)) is None:
                continue
            before, spot = cast
            if name in VIEWS:
                for each in results:
                    self._made.put(each, cast)
            elif is_cast and results[0].dtype is before:
                back = self._spots.note("cast back", name, frame, "")
                spot.add(back=1, same_line=back.where == spot.where)
            else:
                spot.add(used=1)
        if leave or not is_cast or results[0].numel() < 2 or isinstance(given[0], Parameter):
            return
        kind = "cast up" if results[0].dtype is _WIDE else "cast down"
        spot = self._spots.note(kind, name, frame, dtype_name(given[0].dtype))
        spot.add(autocast=in_autocast())
        self._made.put(results[0], (given[0].dtype, spot))
        self._last = weakref.ref(results[0]), spot

    def was_low(self, tensor: Tensor) -> bool:
        """Whether a tensor was cast up to FP32."""
        return (cast := self._made.get(tensor)) is not None and cast[0] in LOW

    def forget(self) -> None:
        self._made.forget()
        self._last = None

    def set_up(self, name: str, given: list[Tensor], results: list[Tensor], frame: types.FrameType) -> None:
        """One op before the first forward pass."""
        for asked in self._asked:
            asked.used |= any(asked.result() is tensor for tensor in given)
            asked.lowered |= bool(given and results) and asked.parameter() is given[0] and results[0].dtype in LOW
        if _is_cast(name, given, results) and isinstance(given[0], Parameter) and results[0].dtype is _WIDE:
            spot = self._spots.note("upcast", name, frame, dtype_name(given[0].dtype))
            self._asked.append(_Asked(weakref.ref(given[0]), weakref.ref(results[0]), spot))

    def dropped(self, every: Iterable[Parameter]) -> Iterator[tuple[Spot, Parameter]]:
        """The parameters, of all that are trained, that were to be FP32 and are not; and where.

        A model that was cast to FP32 and back as a whole was cast on purpose.
        """
        low = {p for p in every if p.dtype in LOW}
        found = [(each, p) for each in self._asked if (p := each.parameter()) in low and not each.used]
        whole = {p for each, p in found if each.lowered} == low
        for each, p in found:
            if each.result() is None and p is not None and not (whole and each.lowered):
                yield each.spot, p


def in_autocast() -> bool:
    """Whether an op was called in a region of torch.autocast, which switches itself off before a mode sees the op."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _is_cast(op: str, given: list[Tensor], results: list[Tensor]) -> bool:
    if op != "_to_copy" or not len(given) == len(results) == 1:
        return False
    before, after = given[0].dtype, results[0].dtype
    return (before in LOW and after is _WIDE) or (before is _WIDE and after in LOW)
