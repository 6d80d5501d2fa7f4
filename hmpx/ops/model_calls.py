"""Patches that tell where a model runs: the calls of modules, and backward passes.

Where casts belong to the model (``where="model"``), the call of a module opens a region that casts, and so does a
checkpointed function, which runs again in backward. Under either setting, a backward pass opens one in which ops are
cast only where a forward is computed again, and in the `backward` of a `torch.autograd.Function`: the hooks of
gradients are beside the model.

Compiled code counts as a forward whoever calls it, so a module inside opens nothing there, and Dynamo is told that
nobody has patched `Module.__call__`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state, run_in_region
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import with_dynamo
from hmpx.base.torch_private import HOOKS, has, private
from hmpx.ops.wrapping.models import is_model, run_first
from hmpx.ops.wrapping.switch import CASTS, SCOPE, Switch, in_forward
from hmpx.ops.wrapping.wrappers import Patch, Patching, patch_at

_BACKWARD = "torch.autograd._engine_run_backward"  # in which `backward` and `grad` end, whoever has patched these
_BACKWARDS = (_BACKWARD,) if has(_BACKWARD) else ("torch.autograd.backward", "torch.autograd.grad")
_CHECKPOINT = "torch.utils.checkpoint.checkpoint"
_CALL = "torch.nn.Module.__call__"
_WAYS = tuple(f"torch.nn.Module.{name}" for name in ("_wrapped_call_impl", "_compiled_call_impl", "_call_impl"))
_HOOKS = "BackwardHookFunctionBackward"  # the node in which a module's own backward hooks run, and nothing else
_DYNAMO_CALL = "unpatched_nn_module_call"  # Dynamo compares with it to see whether it may go straight to `forward`


def patches(switch: Switch) -> Iterator[Patch]:
    """Yield the patches of one conversion."""
    HOOKS.is_on()
    for path in _BACKWARDS:
        yield patch_at(path, Patching.BACKWARD, functools.partial(_running, run_in_region.run_backward, switch))
    if switch.everywhere:
        return
    yield patch_at(_CHECKPOINT, Patching.FORWARD, functools.partial(_running, run_in_region.run_forward, switch))
    yield patch_at(_CALL, Patching.FORWARD, functools.partial(_calling, switch))


def tell_dynamo(changes: Changes) -> None:
    """Let Dynamo take the patched `Module.__call__` for torch's own, until `changes` are undone."""

    def tell(dynamo: ModuleType) -> None:
        for module in (dynamo.utils, dynamo.variables.nn_module):
            if has(path := f"{module.__name__}.{_DYNAMO_CALL}"):
                changes.put(Attribute(module, _DYNAMO_CALL, path), torch.nn.Module.__call__)

    with_dynamo(tell, changes)


def _calling(switch: Switch, original: Callable) -> Callable:
    """Return `Module.__call__` opening a region, as `run_in_region.run_forward` does, which is slower.

    It takes the place of torch's own function, whose two ways on it knows: a frame more would cost a fifth of a call.
    """
    nowhere, in_forward, enter = region_state.nowhere, region_state.IN_FORWARD, region_state.enter_region
    models = process_state.models  # of this conversion; emptied when it ends
    ways = all(map(has, _WAYS))
    is_torchs, leave = ways and original is private(_WAYS[0]), run_in_region.leave_forward

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        here = nowhere.here
        if is_torchs and here.casting:
            return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
        if here is not nowhere or id(self) not in models or not (is_torchs and process_state.enabled):
            return _call_elsewhere(switch, original, self, args, kwargs)
        try:
            try:
                enter(in_forward)
                return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)
            finally:
                if nowhere.here is in_forward:
                    enter(nowhere)
                else:
                    leave()
        except BaseException:
            leave()  # in case an interrupt came before the other, or while that ran
            raise

    return call


def _call_elsewhere(switch: Switch, original: Callable, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call a module in some region, or for the first time, or one that is no model."""
    run = run_in_region.run_forward
    if switch.retired or is_dynamo_compiling() or region_state.acts() is not None or not is_model(module):
        return original(module, *args, **kwargs)
    if id(module) in process_state.models:
        return run(original, (module, *args), kwargs)
    return run_first(module, original, run, args, kwargs)


def mark_functions(changes: Changes) -> None:
    """Have each node of a `torch.autograd.Function` know where its forward was called: whether ops were cast, by what.

    None: outside of a model.
    """

    def begin(node, *args, **kwargs):
        acts = region_state.acts() if type(node).__name__ != _HOOKS else False
        setattr(node, SCOPE, region_state.scope())
        setattr(node, CASTS, acts if acts is not None or not in_forward(sys._getframe(1)) else True)

    label = "torch.autograd.function.BackwardCFunction.__init__"
    changes.put(Attribute(BackwardCFunction, "__init__", label), begin)


def _running(run: Callable, switch: Switch, original: Callable) -> Callable:
    @functools.wraps(original)
    def running(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or switch.casts_off():
            return original(*args, **kwargs)
        return run(original, args, kwargs)

    return running
