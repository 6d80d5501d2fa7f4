"""The lists of prepared models where these have different ones: each model's hold in its forward.

Such lists are an overlay that takes the place of the conversion's own lists, below all other overlays. The rule that
puts it in force stands in every module of the model, since programs call parts of a model too (``vae.encode``). Inside
of a model's lists a part has nothing to add, so that modules that two models share follow the model that calls them.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hmpx.base import process_state as state
from hmpx.base.changes import Changes
from hmpx.ops.module_rules import ModuleRule, forward_class, has_forward
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.callers import runs_later

Module = torch.nn.Module
_OUTERMOST = 1 << 30  # further out than any container of a module


@dataclass(frozen=True)
class ModelLists(Overlay):
    """All lists of a model. policy: None casts nothing. everywhere: whether it casts ops outside of modules too."""

    policy: Policy | None = None
    everywhere: bool = False
    of_model: ClassVar[bool] = True

    def over(self, policy: Policy) -> Policy:
        return Policy() if self.policy is None else self.policy

    def in_words(self) -> str:
        return "nothing cast" if self.policy is None else f"the lists of {self.where}"


class ListsRule(ModuleRule):
    """The lists of one model in the forward of its modules.

    yields: whether it has nothing to add inside of a model's lists; that of the model itself has.
    """

    overlay: ModelLists

    def __init__(self, model: Module, lists: ModelLists, *, yields: bool) -> None:
        self.overlay, self.yields, self.casts_arguments, self.active = lists, yields, False, False
        modules = [each for each in (model.modules() if yields else [model]) if _can_have_lists(each)]
        self._modules = [(weakref.ref(each), _OUTERMOST - (not yields)) for each in modules]
        self._parameters = [weakref.ref(p) for p in model.parameters()] if yields else []
        self.classes = {forward_class(each) for each in modules if "forward" not in vars(each)}

    def __reduce__(self) -> tuple:
        return _removed, ()

    def apply(self, changes: Changes | None = None) -> None:
        with state.lock:
            for p in self._alive_parameters():
                state.lists_of_parameters[p] = self.overlay.number
        super().apply(changes)

    def remove(self) -> None:
        with state.lock:
            for p in self._alive_parameters():
                if state.lists_of_parameters.get(p) == self.overlay.number:
                    del state.lists_of_parameters[p]
        super().remove()

    def _alive_parameters(self) -> list[Any]:
        return [p for reference in self._parameters if (p := reference()) is not None]


def rules_of_lists(model: Module, lists: ModelLists) -> list[ListsRule]:
    """Return the rules that put the lists of a model in force: in all its modules, and in the model itself."""
    return [ListsRule(model, lists, yields=yields) for yields in (True, False)]


def _can_have_lists(module: Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or not has_forward(module):
        return False
    return not runs_later(inspect.unwrap(module.forward))


def _removed() -> ListsRule:
    """Return the rule that a pickled module carries: the lists of the process that reads it are others."""
    return ListsRule(Module(), ModelLists("a pickled module"), yields=True)
