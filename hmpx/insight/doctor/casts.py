"""Casts whose results are only cast back: FP32 that was asked for and did not happen, a rounding, a detour."""

from __future__ import annotations

import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from hmpx.insight.doctor.spots import Spot, Spots
from hmpx.insight.tensors import LOW, Tensor

_VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute unsqueeze squeeze expand slice select split detach alias".split()
)
_WIDE = torch.float32


@dataclass
class _Cast:
    result: weakref.ref[Tensor]
    before: torch.dtype
    spot: Spot


class CastsByHand:
    """Follows what a cast has made to the ops that read it. `spots` of kind "cast" count these."""

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self._made: dict[int, _Cast] = {}

    def follow(
        self, name: str, args: tuple, given: list[Tensor], results: list[Tensor], frame: types.FrameType, leave: bool
    ) -> None:
        """One op. leave: of a backward pass or a step, in which no cast is followed."""
        is_cast = name == "_to_copy" and len(given) == len(results) == 1 and given[0].dtype is not results[0].dtype
        for tensor in given:
            cast = self._made.get(id(tensor))
            if cast is None or cast.result() is not tensor or name == "detach":
                continue
            if name in _VIEWS:
                for each in results:
                    self._made[id(each)] = _Cast(weakref.ref(each), cast.before, cast.spot)
            elif is_cast and results[0].dtype is cast.before:
                back = self._spots.note("cast back", name, frame, "")
                cast.spot.add(back=1, same_line=back.where == cast.spot.where)
            else:
                cast.spot.add(used=1)
        if leave or not is_cast or not _changes(given[0].dtype, results[0].dtype) or results[0].numel() < 2:
            return
        if isinstance(given[0], torch.nn.Parameter):
            return
        if len(self._made) > 4096:
            self.forget()
        kind = "up" if results[0].dtype is _WIDE else "down"
        spot = self._spots.note(f"cast {kind}", name, frame, _word(given[0].dtype))
        spot.add(autocast=in_autocast())
        self._made[id(results[0])] = _Cast(weakref.ref(results[0]), given[0].dtype, spot)

    def forget(self) -> None:
        self._made.clear()


def in_autocast() -> bool:
    """Whether an op was called in a region of torch.autocast, which switches itself off before a mode sees the op."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1


def _changes(before: torch.dtype, after: torch.dtype) -> bool:
    return (before in LOW and after is _WIDE) or (before is _WIDE and after in LOW)


def _word(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
