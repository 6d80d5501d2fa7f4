"""The forwards of modules with rules: each runs in the scope that its rules make.

While torch is converted, the forward of a class is wrapped once a module of it has a rule; the wrapper looks at the
module's own attribute. A forward that stands in the module itself (`module.forward = ...`, as Accelerate does it) is
wrapped there. Hooks would not do: after Ctrl-C, the hook that leaves the scope would not be called.

The lists of a prepared model that has others than the conversion are an overlay that takes the place of the
conversion's own lists, below all other overlays. The rule that puts it in force stands in every module of the model,
since programs call parts of a model too (``vae.encode``). Inside a model's lists, the rule of a part does nothing, so a
module that two models share follows the model that calls it. Ops outside of all models follow the conversion's lists.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, MethodType
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state as state
from hmpx.base import region_state
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import never_compile_alone
from hmpx.base.region_state import Region, innermost
from hmpx.base.run_in_region import run_at, run_in
from hmpx.errors import HmpxError
from hmpx.ops.autocast import in_enabled_region
from hmpx.ops.module_rules import RULES, ModuleRule, deciding, forward_class, has_forward, lowering_rule, rules_of
from hmpx.ops.overlays import Overlay, lists_of, registered, scope_inside
from hmpx.ops.policies.policy import Policy
from hmpx.ops.wrapping.callers import runs_later
from hmpx.ops.wrapping.observing import say_beats_island, say_once
from hmpx.ops.wrapping.rules import is_eligible

Module = torch.nn.Module
# Attribute of a class with a wrapped forward, inherited by the classes below: its identity. Of a module in which a
# wrapped forward stands: 0. So a wrapper knows whether another one, further out, has put the module's rules in force.
_OUTERMOST = "_hmpx_outermost"
_LAZY = (GeneratorType, CoroutineType, AsyncGeneratorType, map, filter)  # these compute later


def wrap_forwards(changes: Changes) -> None:
    """Wrap the forwards of modules with rules, also of those that get one later, until `changes` are undone."""
    wrap = functools.partial(_wrap, changes)
    changes.put(state.variable("wrap_forward"), wrap)
    for rule in list(state.module_rules):
        for cls in rule.classes:
            wrap(cls)
        for module in rule.modules():  # whose class may be another one than before
            wrap(module if "forward" in vars(module) else forward_class(module))


def _wrap(changes: Changes, owner: Any) -> None:
    """Wrap the forward that stands in a class or in a module, unless it is wrapped."""
    inner = vars(owner)["forward"]
    if isinstance(owner, Module):
        if not (isinstance(inner, functools.partial) and inner.func is _forward_of):
            outer = functools.update_wrapper(functools.partial(_forward_of, owner, inner), inner)
            changes.put(Attribute(owner, "forward", f"the forward of a {type(owner).__name__}"), outer)
            changes.put(Attribute(owner, _OUTERMOST, f"a {type(owner).__name__}.{_OUTERMOST}"), 0)
    elif _OUTERMOST not in vars(owner):
        name = f"{owner.__module__}.{owner.__qualname__}"
        changes.put(Attribute(owner, RULES, f"{name}.{RULES}"), ())
        changes.put(Attribute(owner, _OUTERMOST, f"{name}.{_OUTERMOST}"), id(owner))
        changes.put(Attribute(owner, "forward", f"{name}.forward"), _placing(inner, id(owner)))


def _placing(original: Callable, owner: int) -> Callable:
    """Return the forward of a class for modules with rules; `owner` is the class by identity.

    A forward that calls the one of its base class has its rules already.
    """

    @functools.wraps(original)
    def forward(self, *args, **kwargs):
        rules = getattr(self, RULES, ())  # the class has none any more where somebody has kept this wrapper
        if not rules or getattr(self, _OUTERMOST, owner) != owner or not _act(rules):
            return original(self, *args, **kwargs)
        return _run(rules, original, (self, *args), kwargs)

    return forward


def _forward_of(module, inner, /, *args, **kwargs):
    """Run a forward that is an attribute of the module itself."""
    rules = rules_of(module)
    if not rules or not _act(rules):
        return inner(*args, **kwargs)
    return _run(rules, inner, args, kwargs)


def _act(rules):
    """Return whether rules act here: in ``torch.autocast(enabled=False)`` one that names ops for low precision does."""
    if region_state.casts_on():
        return True
    rule = lowering_rule(rules) if region_state.innermost().island else None
    if rule is not None and not is_dynamo_compiling():
        say_beats_island(f"the rule at {rule.where}", sys._getframe(2))
    return rule is not None


def _run(rules, function, args, kwargs):
    """Call a forward in the scope of its module's rules; a copied module may carry rules that were removed."""
    around = scope = region_state.scope()
    overlay, casting = None, None
    for rule in deciding(rules):
        if rule.yields and lists_of(scope):
            continue
        overlay = rule.overlay
        if overlay.dtype is not None:  # the lists around decide nothing any more
            casting = overlay if overlay.casts_arguments and rule.casts_arguments else None
        scope = scope_inside(scope, overlay.number)
    if casting is not None:
        args = tuple([_cast_once(value, casting) for value in args])
        kwargs = {key: _cast_once(value, casting) for key, value in kwargs.items()}
    result = run_in_scope(around, scope, function, args, kwargs)
    if overlay is not None and isinstance(result, _LAZY):
        raise HmpxError(
            f"{overlay.where}: the forward returned a {type(result).__name__}, whose ops run after the call, where the "
            f"rule does not hold; return a list or tuple"
        )
    return result


def _cast_once(value: Any, overlay: Overlay) -> Any:
    """Cast an argument. A list or dict stays the same object, since the module may write to it."""
    if isinstance(value, torch.Tensor):
        return value.to(overlay.dtype) if value.dtype is not overlay.dtype and is_eligible(value) else value
    if isinstance(value, tuple):
        items = [_cast_once(item, overlay) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def replaced_forwards() -> list[str]:
    """Describe the rules that do nothing because someone replaced the wrapped forward of their module."""
    if state.wrap_forward is None:
        return []
    return [
        f"{rule.where}: the forward of a {type(module).__name__} was replaced after convert(), and the rule may not "
        f"hold in the new one: call convert() again"
        for rule in list(state.module_rules)
        for module in rule.modules()
        if not _is_wrapped(module.forward)
    ]


def _is_wrapped(forward: Any) -> bool:
    """Return whether a forward is our wrapper, or wraps it and says so by `functools.wraps`."""
    while forward is not None:
        if isinstance(forward, functools.partial):
            if forward.func is _forward_of:
                return True
        elif getattr(forward, "__code__", None) is _WRAPPER:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


_WRAPPER = _placing(Module.forward, 0).__code__


def unwrapped(forward: Any) -> Any:
    """Return the forward of a class or of a module that a wrapper of ours runs, bound as that; others as they are."""
    function = getattr(forward, "__func__", forward)
    if isinstance(function, functools.partial) and function.func is _forward_of:
        return unwrapped(function.args[1])
    if getattr(function, "__code__", None) is not _WRAPPER:
        return forward
    own = function.__wrapped__
    return own if function is forward else MethodType(own, forward.__self__)


def overlay_that_casts(frame: FrameType) -> Overlay | None:
    """Return the overlay of the module rule by which `frame` casts an argument; None if it casts none."""
    return frame.f_locals["overlay"] if frame.f_code is _cast_once.__code__ else None


_BEYOND = 1 << 30  # a distance beyond that of any container of a module
_NO_LISTS = (
    "this model's recipe has no op lists, and beside a model with lists torch.autocast does nothing in it: give it a "
    "recipe with lists (autocast-cuda, autocast-cpu)"
)


@dataclass(frozen=True)
class ModelLists(Overlay):
    """All lists of a model. policy: None casts nothing."""

    policy: Policy | None = None
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
        self._modules = [(weakref.ref(each), _BEYOND - (not yields)) for each in modules]
        self.classes = {forward_class(each) for each in modules if "forward" not in vars(each)}

    def __reduce__(self) -> tuple:
        return _removed, ()


def rules_of_lists(model: Module, where: str, policy: Policy | None) -> list[ListsRule]:
    """Return the rules that put the lists of a model in force: in all its modules, and in the model itself."""
    lists = registered(ModelLists(where, policy=policy))
    return [ListsRule(model, lists, yields=yields) for yields in (True, False)]


def _can_have_lists(module: Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or not has_forward(module):
        return False
    return not runs_later(inspect.unwrap(module.forward))


def _removed() -> ListsRule:
    """Return the inactive rule that a pickled module carries, since the process that reads it has other lists."""
    return ListsRule(Module(), ModelLists("a pickled module"), yields=True)


def run_in_scope(around: int, scope: int, function: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a forward in a scope that a module's rules make inside of another one."""
    lists = lists_of(scope)
    if not lists or lists == lists_of(around) or state.overlays[lists].policy is not None:
        return run_at(scope, function, args, kwargs)
    here = innermost()
    if not is_dynamo_compiling() and in_enabled_region():
        say_once(logging.WARNING, _NO_LISTS, sys._getframe(2))
    return run_in(Region(False, here.rounding, here.maps, scope), function, args, kwargs)


never_compile_alone(run_in_scope)
