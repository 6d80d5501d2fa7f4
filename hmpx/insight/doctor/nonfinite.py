"""The first op that makes an inf or a NaN of finite numbers: in the forward pass, the backward pass, or the step."""

from __future__ import annotations

import math
import types
from typing import Any

import torch

from hmpx.insight.doctor.spots import Spot, Spots
from hmpx.insight.tensors import LOW, Tensor, is_masked

_CONSTANTS = frozenset("masked_fill masked_fill_ where fill fill_ full full_like mul add sub _to_copy rsub".split())
_HUGE = 1e4  # what is larger was meant to be out of reach
_UNMADE = frozenset("empty empty_like empty_strided new_empty new_empty_strided resize_ _unsafe_view view".split())


class Nonfinite:
    """Looks at each result; kinds "mask" and "inf or NaN" of spots.

    first: the first op of all. made_nan: whether a NaN was made.
    """

    def __init__(self, spots: Spots) -> None:
        self._spots = spots
        self.first: Spot | None = None
        self.made_nan = False

    def look(
        self,
        name: str,
        args: tuple,
        kwargs: dict,
        given: list[Tensor],
        results: list[Tensor],
        frame: types.FrameType,
        node: Any,
        stepping: bool,
    ) -> None:
        """One op."""
        if name in _UNMADE or (self.first is not None and self.made_nan):
            return
        for result in results:
            if _is_finite(result):
                continue
            scalars = [float(v) for v in (*args, *kwargs.values()) if isinstance(v, int | float)]
            if not all(map(_is_finite, given)) or not all(map(math.isfinite, scalars)):
                return
            odd = result[~torch.isfinite(result)]
            is_nan = bool(odd.isnan().any())
            largest = max([0.0, *map(abs, scalars), *(float(t.abs().max()) for t in given if t.numel())])
            if not is_nan and result.dtype in LOW and name in _CONSTANTS and largest >= _HUGE and node is None:
                spot = self._spots.note("mask", name, frame, f"{largest:.4g}")
                spot.add(elements=odd.numel())
                return
            if not is_nan and node is None and is_masked(name.rstrip("_"), given, result):
                return
            self.made_nan |= is_nan
            stage = "in the step" if stepping else f"in the backward pass ({node.name()})" if node else "forward"
            spot = self._spots.note("inf or NaN", name, frame, stage)
            spot.add(nan=is_nan, elements=odd.numel(), backward=node is not None, low=result.dtype in LOW)
            self.first = self.first or spot
            return


def _is_finite(tensor: Tensor) -> bool:
    if not tensor.numel():
        return True
    wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    return math.isfinite(float(tensor.detach().sum(dtype=wide))) or bool(torch.isfinite(tensor).all())
