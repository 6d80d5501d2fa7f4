"""Which model the parameters of an optimizer are in, and what they are called there."""

from __future__ import annotations

import types
from collections.abc import Iterable

import torch

from hmpx.ops.wrapping.callers import frames
from hmpx.updates.stepping.names import names_in

Parameter = torch.nn.Parameter


class Owners:
    """The models that stand in the variables of whoever steps an optimizer, or in the objects whose method does."""

    def __init__(self) -> None:
        self._names: dict[Parameter, str] = {}

    def look(self, frame: types.FrameType | None, params: Iterable[Parameter]) -> None:
        """Find the modules that hold these parameters."""
        wanted = {id(p) for p in params}
        for each in frames(frame):
            values = list(each.f_locals.values())
            holder = each.f_locals.get("self")
            values += list(getattr(holder, "__dict__", {}).values())
            found = [value for value in values if isinstance(value, torch.nn.Module)]
            for model in sorted(found, key=lambda model: -sum(id(p) in wanted for p in model.parameters())):
                here = {id(p) for p in model.parameters()}
                if here & wanted:
                    wanted -= here
                    self._names = {**names_in(model), **self._names}
            if not wanted:
                return

    def every(self) -> dict[Parameter, str]:
        """Every parameter of these models, trained or not, with its name."""
        return self._names

    def names(self, params: Iterable[Parameter]) -> dict[Parameter, str]:
        """What these parameters are called; by its place in the optimizer what is in no model."""
        return {p: self._names.get(p) or f"parameter {i} of shape {tuple(p.shape)}" for i, p in enumerate(params)}
