"""Rules of modules: lists that hold in the forward of a module, and in everything that it calls.

A module carries its rules as an attribute, so that copies, replicas and pickled modules carry them too. `forwards`
looks at it.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from hmpx.base import process_state as state
from hmpx.base.changes import Changes
from hmpx.errors import HmpxError
from hmpx.ops.overlays import Overlay, number_inside, overlay_by_hand
from hmpx.ops.policies.fp8_format import Format
from hmpx.ops.wrapping.callers import runs_later

Module = torch.nn.Module
RULES = "_hmpx_rules"  # the attribute: rules, each with the number of containers between it and the module
# Classes of torch whose forward nobody calls, and who takes their weights.
_NOT_CALLED = {"NonDynamicallyQuantizableLinear": "MultiheadAttention takes its weights; give that the rule"}


class ModuleRule:
    """One rule of a module, returned by `hmpx.policy_for`.

    Attributes:
        where: what says so, as file:line.
        active: whether it has not been removed.

    `remove()` takes it away, from copies of the module too; what the module had before is in force again.

    Example:
        >>> rule = hmpx.policy_for(model, fp32=["linear"])
        >>> with hmpx.convert():
        ...     before = model(inputs).dtype
        ...     rule.remove()
        ...     before, model(inputs).dtype
        (torch.float32, torch.bfloat16)
    """

    yields = False  # whether the rule does nothing inside of a prepared model's own lists

    def __init__(self, module: Module, overlay: Overlay, *, casts_arguments: bool = True) -> None:
        self.overlay, self.casts_arguments = overlay, casts_arguments
        self.active = False
        targets = list(_with_forward(module))
        for each, _ in targets:
            _refuse(each)
        if nothing := never_called(module):
            raise HmpxError(f"a rule for a {type(module).__name__}: {nothing}")
        self._modules = [(weakref.ref(each), distance) for each, distance in targets]
        self.classes = {forward_class(each) for each, _ in targets if "forward" not in vars(each)}

    @property
    def where(self) -> str:
        return self.overlay.where

    def __repr__(self) -> str:
        return f"<hmpx.ModuleRule, {'active' if self.active else 'removed'}: {self.where}>"

    def __copy__(self) -> ModuleRule:
        return self

    def __deepcopy__(self, memo: dict) -> ModuleRule:
        return self

    def __reduce__(self) -> tuple:
        return _unpickled, (self.overlay, self.active, self.classes, self.casts_arguments)

    def modules(self) -> Iterator[Module]:
        """Yield the live modules whose forward this rule is about."""
        return (module for module, _ in self._alive())

    def _alive(self) -> Iterator[tuple[Module, int]]:
        return ((module, distance) for reference, distance in self._modules if (module := reference()) is not None)

    def apply(self, changes: Changes | None = None) -> None:
        """Put the rule in force over the module's other rules, until `changes` are undone if given."""
        with state.lock:
            self.active = True
            state.module_rules.add(self)
            if state.wrap_forward is not None:
                for cls in self.classes:
                    state.wrap_forward(cls)
            for module, distance in self._alive():
                # Containers first; of rules for the same one, the last is the last that was given.
                vars(module)[RULES] = tuple(sorted((*rules_of(module), (distance, self)), key=lambda each: -each[0]))
                if state.wrap_forward is not None and "forward" in vars(module):
                    state.wrap_forward(module)
        if changes is not None:
            changes.callback(self.remove)

    def remove(self) -> None:
        """Remove the rule; a second call does nothing."""
        with state.lock:
            self.active = False
            state.module_rules.discard(self)
            for module in self.modules():
                others = tuple(each for each in rules_of(module) if each[1] is not self)
                if others:
                    vars(module)[RULES] = others
                else:
                    vars(module).pop(RULES, None)


def policy_for(
    module: Module,
    rule: torch.dtype | str | Mapping[str, Any] | None = None,
    /,
    *,
    bf16: Iterable[str] | None = None,
    fp32: Iterable[str] | None = None,
    promote: Iterable[str] | None = None,
    fp8: Iterable[str] | None = None,
    low_precision: torch.dtype | str | None = None,
    fp8_format: Format | str | Mapping[str, Any] | None = None,
) -> ModuleRule:
    """Say in which precision ops run in the forward of a module, and in all that it calls.

    The lists lie over those around the module: they move the ops that they name and leave the others. Of nested modules
    the innermost decides, of several rules for one module the last. A rule may come before `convert()` or after it, and
    does nothing while nothing is converted, or in `disable_casts()`. Copies of the module have the rule too.

    Args:
        module: any module; the rule of a container without a forward (`ModuleList`) is one of each module that is in it
            now, and of none that is appended later.
        rule: torch.float32, torch.bfloat16, torch.float16 or its name, for every op that computes; the floating tensors
            that the module is called with are cast once, as by hand, so that an in-place write to one goes to a copy.
            "bf16-to-fp32": matrix products take BF16 and hand on FP32, and every other op is in FP32. Or a mapping of
            the arguments below, as a recipe has it.
        bf16, fp32, promote, fp8: names of ops.
        low_precision: what the ops in the bf16 list run in from here on; None for what they run in around.
        fp8_format: the same of the fp8 list, as of `hmpx.convert`.

    Returns:
        A handle, whose `remove()` takes the rule away.

    Raises:
        HmpxError: a scripted module, or one whose forward is a generator or coroutine; a rule that says nothing. When
            the module is called: its forward returned a generator, a `map` or the like, whose ops run later.
        UnknownOpError, OpListError: a name that is no op, or on two sides.

    Example:
        >>> rule = hmpx.policy_for(model, fp32=["linear"])
        >>> with hmpx.convert():
        ...     model(inputs).dtype
        torch.float32
        >>> rule.remove()
    """
    if not isinstance(module, Module):
        raise HmpxError(f"policy_for takes a torch.nn.Module, not a {type(module).__name__}")
    said = (bf16, fp32, promote, fp8, low_precision, fp8_format)
    made = ModuleRule(module, overlay_by_hand("policy_for", rule, said, sys._getframe(1)))
    try:
        made.apply()
        if state.learn is not None:
            state.learn(scopes_of_rules())
    except BaseException:  # a function of the user's that cannot be cast, say
        made.remove()
        raise
    return made


def _unpickled(overlay: Overlay, active: bool, classes: set[type], casts_arguments: bool = True) -> ModuleRule:
    """Register a rule that was unpickled with its module."""
    rule = ModuleRule.__new__(ModuleRule)
    rule.overlay, rule.active, rule.classes, rule._modules = overlay, active, classes, []
    rule.casts_arguments = casts_arguments
    if active:
        rule.apply()
    return rule


def rules_of(module: Module) -> tuple[tuple[int, ModuleRule], ...]:
    """Return a module's rules, outermost first, each with the number of containers between it and the module."""
    return vars(module).get(RULES, ())


def deciding(rules):
    """Return the rules that decide, outermost first: of each level the last active one."""
    if len(rules) == 1:
        return [rules[0][1]] if rules[0][1].active else []
    return list({distance: rule for distance, rule in rules if rule.active}.values())


def lowering_rule(rules):
    """Return the innermost of these rules of a module that names ops for low precision; None if none does."""
    found = [rule for rule in deciding(rules) if rule.overlay.lowers]
    return found[-1] if found else None


def forward_class(module: Module) -> type:
    """Return the class that defines the forward of a module."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def has_forward(module: Module) -> bool:
    """Return whether a module has a forward; a container has none."""
    return "forward" in vars(module) or type(module).forward is not Module.forward


def never_called(module: Module) -> str:
    """Return why a rule of this module would do nothing; an empty string if it does something."""
    kinds = [type(each).__name__ for each, _ in _with_forward(module)]
    if not kinds:
        return "there is no forward in it"
    return "" if set(kinds) - _NOT_CALLED.keys() else f"its forward is never called: {_NOT_CALLED[kinds[0]]}"


def modules_called_in(module: Module) -> list[Module]:
    """Return the nearest modules inside whose forward is called."""
    return [each for child in module.children() for each, _ in _with_forward(child) if not never_called(each)]


def _with_forward(module: Module, distance: int = 0) -> Iterator[tuple[Module, int]]:
    """Yield the module itself; for a container without a forward, the modules in it."""
    if has_forward(module) or isinstance(module, torch.jit.ScriptModule):
        yield module, distance
        return
    for child in module.children():
        yield from _with_forward(child, distance + 1)


def _refuse(module: Module) -> None:
    """Raise an HmpxError if the ops of a module are out of reach of a rule."""
    why = ""
    if isinstance(module, torch.jit.ScriptModule):
        why = "a scripted module is compiled, and no rule reaches its ops"
    elif runs_later(inspect.unwrap(module.forward)):
        why = "its forward is a generator or coroutine function, whose body runs after the call"
    if why:
        raise HmpxError(f"a rule for a {type(module).__name__}: {why}")


def scopes_of_rules() -> set[int]:
    """Return the scopes that the rules in force can make, nested modules included."""
    found: set[int] = set()
    seen: set[tuple[int, int]] = set()

    def walk(module: Module, scope: int) -> None:
        for rule in deciding(rules_of(module)):
            scope = number_inside(scope, rule.overlay.number)
            found.add(scope)
        if (id(module), scope) not in seen:
            seen.add((id(module), scope))
            for child in module.children():
                walk(child, scope)

    for rule in list(state.module_rules):
        found.add(number_inside(0, rule.overlay.number))
        for module in rule.modules():
            walk(module, 0)
    return found


def policies_of(model: Module) -> list[ModuleRule]:
    """Return the rules in force in a model, from `policy_for` or a recipe.

    In a model that was copied or loaded they are other objects than `policy_for` returned; `remove()` takes them away
    all the same.

    Returns:
        Each rule once, in the order of `model.modules()`; of one module those of its containers first.

    Example:
        >>> import copy
        >>> _ = hmpx.policy_for(model, fp32=["linear"])
        >>> rules = hmpx.policies_of(copy.deepcopy(model))
        >>> [rule.remove() for rule in rules], hmpx.policies_of(model)
        ([None], [])
    """
    if not isinstance(model, Module):
        raise HmpxError(f"policies_of takes a torch.nn.Module, not a {type(model).__name__}")
    found = [rule for module in model.modules() for _, rule in rules_of(module) if rule.active]
    return list(dict.fromkeys(found))
