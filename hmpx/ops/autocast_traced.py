"""`torch.autocast` regions in code that Dynamo traces, where op lists cast.

Dynamo never runs ``torch.autocast.__enter__``: it has a variable of its own for a region. While torch is converted, the
variable traces `region_state.enter_autocast` and `leave` in the place of torch's functions, so that nodes, guards and
cleanup are those of hmpx's own regions.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from hmpx.base import region_state
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import with_dynamo
from hmpx.base.torch_private import private
from hmpx.ops.autocast_regions import asked_for, governs, in_enabled_region
from hmpx.ops.module_rules import lowering_rule
from hmpx.ops.policies.policy import LOW_RULES
from hmpx.ops.wrapping.switch import in_method

_VARIABLE = "torch._dynamo.variables.ctx_manager.AutocastModeVariable"


def apply(changes: Changes) -> None:
    """Let Dynamo trace regions of hmpx in the place of those of `torch.autocast`, until `changes` are undone."""
    with_dynamo(functools.partial(_exchange, changes), changes)


def _exchange(changes: Changes, dynamo: ModuleType) -> None:
    variable = dynamo.variables.ctx_manager.AutocastModeVariable
    enter, leave = variable.enter, variable.exit

    def entering(self: Any, tx: Any) -> Any:
        if not _inlined(tx, governs).as_python_constant():
            return enter(self, tx)
        _, dtype, enabled, _ = self.target_values
        if self.source is not None and hasattr(tx.output, "resolve_source_value"):  # a decorator; since torch 2.13
            enabled = asked_for(tx.output.resolve_source_value(self.source), enabled)
        inside = list(_modules(tx))
        casts = (enabled and dtype in (None, *LOW_RULES)) or bool(inside and lowering_rule(inside[0]))
        opened = vars(tx.output).setdefault("hmpx_regions", [])  # whether each casts
        in_model = casts or inside or any(opened) or in_enabled_region() or in_method(sys._getframe())
        opened.append(casts)
        self.hmpx_region = _aside(tx, region_state.enter_autocast, casts, bool(in_model))
        return _inlined(tx, _nothing)

    def leaving(self: Any, tx: Any, *exception: Any) -> Any:
        if getattr(self, "hmpx_region", None) is None:
            return leave(self, tx, *exception)
        region, self.hmpx_region = self.hmpx_region, None
        tx.output.hmpx_regions.pop()
        return _aside(tx, region_state.leave, region)

    for name, value in (("enter", entering), ("exit", leaving)):
        changes.put(Attribute(variable, name, f"{_VARIABLE}.{name}"), value)


def _modules(tx: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules whose methods Dynamo inlines, innermost first."""
    while tx is not None:
        code = tx.f_code
        name = code.co_varnames[0] if code.co_argcount else ""
        if (name == "self" or code.co_name == "forward") and name in tx.symbolic_locals:
            first = tx.symbolic_locals[name].realize()
            module = getattr(first, "value", None)
            if module is None and hasattr(first, "module_key"):
                module = tx.output.get_submodule(first.module_key)
            if isinstance(module, torch.nn.Module):
                yield module
        tx = getattr(tx, "parent", None)


def _nothing() -> None:
    return None


def _aside(tx: Any, function: Callable, *args: Any) -> Any:
    """Let Dynamo trace a call whose effects are undone before the end of what is traced, as those of a region are.

    In the body of an autograd function it else hands on every tensor that is made there, and raises for views.
    """
    tracer = tx.output.current_tracer
    before = getattr(tracer, "side_effect_stack", None)  # none before torch 2.13
    result = _inlined(tx, function, *args)
    tracer.side_effect_stack = before
    return result


def _inlined(tx: Any, function: Callable, *args: Any) -> Any:
    """Let Dynamo trace a call, with constants and what other calls returned."""
    build = private("torch._dynamo.variables.base.VariableTracker.build")
    given = [value if hasattr(value, "as_proxy") else build(tx, value) for value in args]
    return build(tx, function).call_function(tx, given, {})
