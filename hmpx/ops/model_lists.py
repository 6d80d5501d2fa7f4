"""The lists of prepared models that have different ones: the lists of each model hold in its forward.

Such lists are an overlay that takes the place of the conversion's own lists, below all other overlays. The rule that
puts it in force stands in every module of the model, since programs call parts of a model too (``vae.encode``). Inside
a model's lists, the rule of a part does nothing, so a module that two models share follows the model that calls it.

Outside of every model an op follows the model whose output it takes, as a loss does. An op that takes the output of no
model, or of several, follows the entries that all lists share; a warning names an op on which the lists differ.
"""

from __future__ import annotations

import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar

import torch
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state as state
from hmpx.base import region_state
from hmpx.base.changes import Changes
from hmpx.base.compiling import leave_to_python, never_compile_alone
from hmpx.base.containers import tensors_in
from hmpx.base.region_state import Region, innermost
from hmpx.base.run_in_region import run_at, run_in
from hmpx.base.torch_private import autograd_node
from hmpx.ops.autocast import in_enabled_region
from hmpx.ops.decision_log import say_once
from hmpx.ops.followed import lists_of_node, lists_of_tensors, lists_of_traced, mark, mark_traced
from hmpx.ops.module_rules import ModuleRule, deciding, forward_class, has_forward, rules_of
from hmpx.ops.overlays import Overlay
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.policies.scopes import lists_of, number_inside, scope_inside
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.wrapping.callers import modules, runs_later
from hmpx.ops.wrapping.switch import Switch

Module = torch.nn.Module
_OUTERMOST = 1 << 30  # a distance beyond that of any container of a module
_NO_LISTS = (
    "this model's recipe has no op lists, and beside a model with lists torch.autocast does nothing in it: give it a "
    "recipe with lists (autocast-cuda, autocast-cpu)"
)


@dataclass(frozen=True)
class ModelLists(Overlay):
    """All lists of a model. policy: None casts nothing. everywhere: whether they cast ops outside of modules too."""

    policy: Policy | None = None
    everywhere: bool = False
    of_model: ClassVar[bool] = True

    def over(self, policy: Policy) -> Policy:
        return Policy() if self.policy is None else self.policy

    def in_words(self) -> str:
        return "nothing cast" if self.policy is None else f"the lists of {self.where}"


class ListsRule(ModuleRule):
    """The lists of one model in the forward of its modules.

    yields: whether the rule does nothing inside a model's lists. The rule of the model itself replaces those lists.
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
    """Return the inactive rule that a pickled module carries, since the process that reads it has other lists."""
    return ListsRule(Module(), ModelLists("a pickled module"), yields=True)


# Outside of every model


def build_outside(
    op: str,
    signature: Signature,
    runs: Mapping[int, Callable],
    cases: Mapping[tuple, Callable],
    switch: Switch,
) -> Callable:
    """Return the wrapper of an op for calls outside of every model.

    runs: the wrapper of each scope. cases: the cases of the op, of all scopes. Both grow with the scopes.
    """

    def outside(*args, **kwargs):
        if region_state.acts() is False and not is_dynamo_compiling():
            return runs[0](*args, **kwargs)
        lists = lists_here(args, kwargs)
        here = innermost()
        number = scope_inside(here.scope, lists or state.model_lists[0])
        run = runs.get(number, runs[0])
        if lists:
            return _followed(lists, number, run, args, kwargs)
        if not is_dynamo_compiling() and _differ(runs):
            rule = Rule.FP32 if any(case.rule is Rule.FP32 for each in cases for case in each) else None
            if region_state.traced_into() is None and not switch.casts_off(signature, args, kwargs, rule):
                _tell(op, sys._getframe(1))
        return run(*args, **kwargs)

    return outside


def lists_here(args: tuple, kwargs: Mapping[str, Any]) -> int:
    """Return the number of the lists that a call outside of every model follows; 0 if it follows no model."""
    tensors = tensors_in((*args, *kwargs.values()))
    if is_dynamo_compiling():
        return lists_of_traced(tensors)
    return _lists_now(tensors)


def _lists_now(tensors: list[torch.Tensor]) -> int:
    if region_state.in_backward() and region_state.innermost().casting is None:  # otherwise a forward is computed again
        node = autograd_node()
        return lists_of_node(node) if isinstance(node, BackwardCFunction) else 0
    if (traced := region_state.traced_into()) is not None:  # Dynamo computes a node on fake tensors
        mark_traced(traced.graph)
    return _lists_of_code(sys._getframe(3)) or max(lists_of_tensors(tensors), 0)


def _lists_of_code(frame: FrameType) -> int:
    """Return the lists of the innermost module whose method runs, as where ``model.encode(x)`` calls ops itself."""
    for module in modules(frame):
        for rule in deciding(rules_of(module)):
            if rule.overlay.of_model:
                return rule.overlay.number
    return 0


def _followed(lists: int, scope: int, run: Callable, args: tuple, kwargs: dict) -> Any:
    """Call an op in the scope of the model whose output it takes. Its result counts as output of this model."""
    here = innermost()
    region = Region(_casting(lists), here.rounding, here.maps, scope, None, here.island, here.under)
    result = run_in(region, run, args, kwargs)
    if not is_dynamo_compiling():
        mark(result, lists)
    return result


def _casting(lists: int) -> bool | None:
    """Return the `casting` of the region in which an op runs that follows a model from outside."""
    of_model, casting = state.overlays[lists], innermost().casting
    if of_model.policy is None:
        return False
    return True if of_model.everywhere and casting is None and not region_state.in_backward() else casting


def run_as_model(around: int, scope: int, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a forward in a scope that a module's rules make. If it enters a model's lists, its outputs are marked."""
    lists = lists_of(scope)
    if not lists or lists == lists_of(around):
        return run_at(scope, function, args, kwargs)
    if state.overlays[lists].policy is None:
        here = innermost()
        if not is_dynamo_compiling() and in_enabled_region():
            say_once(logging.WARNING, _NO_LISTS, sys._getframe(2))
        result = run_in(Region(False, here.rounding, here.maps, scope), function, args, kwargs)
    else:
        result = run_at(scope, function, args, kwargs)
    if not is_dynamo_compiling():
        mark(result, lists)
    return result


def _differ(runs: Mapping[int, Callable]) -> bool:
    """Return whether the lists of two models have different rules for an op."""
    return len({id(runs.get(number_inside(0, lists), runs[0])) for lists in state.model_lists[1:]}) > 1


def _tell(op: str, frame: FrameType) -> None:
    say_once(
        logging.WARNING,
        f"{op} is called outside of the prepared models, on the output of none of them or of several, and their lists "
        "differ about it: it runs as the names that all of them agree on say. Call it in a module that is prepared, or "
        "say what it runs in by hmpx.casts(...)",
        frame,
    )


never_compile_alone(run_as_model, _followed, lists_here, build_outside("", Signature(), {}, {}, Switch()))
for each in (_lists_now, mark, _differ, _tell):
    leave_to_python(each.__code__)
