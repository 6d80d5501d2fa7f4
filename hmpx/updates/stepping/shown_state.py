"""The state of one parameter in a step: what the optimizer is shown under the key of a shadow, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hmpx.base.torch_private import version_of
from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.state_dtypes import is_bf16, keeps_bf16
from hmpx.updates.holding.state_forms import form_of, written
from hmpx.updates.holding.state_tensors import held_states
from hmpx.updates.stepping.step_call import hides_writes

Tensor = torch.Tensor
Parameter = torch.nn.Parameter
Optimizer = torch.optim.Optimizer


class ShownState:
    """The state of one parameter, for one step or for all steps in the same batches.

    Attributes:
        own: the parameter's entry in the optimizer's state; None if it has none.
        content: the items of `own`, if that is a dict.
        shown: copies that the optimizer sees in the place of `own`; None where it sees `own` itself.
        keeps_left: whether the object that the step leaves becomes the parameter's entry, as it is.
    """

    def __init__(self, optimizer: Optimizer, segment: Segment) -> None:
        self.segment, self.form = segment, form_of(segment)
        self._states: dict[Any, Any] = optimizer.state  # kept batches hold this, and may not hold the optimizer
        self.own = self._states.get(segment.param)
        items = self.own.items() if isinstance(self.own, dict) else ()
        self.content = {key: value[:] if type(value) is list else value for key, value in items}
        self.shown: dict[str, Any] | None = None
        self.keeps_left = self.form.as_left
        self._versions: list[tuple[Tensor, int]] = []  # of tensors that the step may write to

    def move_to(self, shadow: Parameter, *, watched: bool) -> None:
        """Move the entry to the key of the shadow.

        watched: whether `undo` shall say that the step has written to the parameter's own tensors.
        """
        if watched:
            values = [item for v in self.content.values() for item in (v if isinstance(v, list) else (v,))]
            self._versions = [(value, version_of(value)) for value in values if isinstance(value, Tensor)]
        if self.own is not None:
            self._states.pop(self.segment.param)
            self._states[shadow] = self.own if self.shown is None else self.shown

    def take(
        self, left: Any, optimizer: Optimizer, key: RoundingKey, already: Mapping[str, Tensor] | None = None
    ) -> None:
        """Make what the step has left of a whole parameter's state the parameter's entry.

        already: the shown tensors that are written back already, by their keys.
        """
        p, already = self.segment.param, already or {}
        if left is None:
            if self.own is not None:
                self._states.pop(p, None)
        elif isinstance(left, dict) and not self.keeps_left:
            before, after = held_states(self.own or {}, p), dict[str, Any]()
            for name, value in left.items():
                if name in already and value is already[name]:
                    after.update(before[name].entries(name))
                else:
                    after.update(written(self.form, self.segment, name, value, before.get(name), key))
            self.keep(after)
        else:
            if self.own is None and isinstance(left, dict) and any(map(is_bf16, left.values())):
                keeps_bf16(optimizer)
            self._states[p] = left

    def take_from(self, shadow: Parameter, optimizer: Optimizer, key: RoundingKey) -> None:
        """Make the entry that the step has left under the key of the shadow the parameter's."""
        self.take(self._states.pop(shadow, None), optimizer, key)

    def keep(self, after: Mapping[str, Any]) -> None:
        """Make these items the parameter's entry, in the dict that it has."""
        if after or self.own is not None:
            state = self._states.setdefault(self.segment.param, {} if self.own is None else self.own)
            state.clear()
            state.update(after)

    def undo(self, shadow: Tensor) -> None:
        """Give the parameter its entry again, with the items that it had, after the step raised."""
        self._states.pop(shadow, None)
        if self.own is not None:
            if isinstance(self.own, dict):
                self.own.clear()
                self.own.update(self.content)
            self._states[self.segment.param] = self.own

    def is_written(self, optimizer: Optimizer) -> bool:
        """Whether the step has written to the parameter's own tensors in place, which cannot be undone."""
        is_blind = hides_writes(optimizer)
        return any(is_blind or version_of(tensor) != version for tensor, version in self._versions)
