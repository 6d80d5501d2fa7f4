"""Where a model runs, and what runs outside of it: patches of functions of torch that are no ops.

Under ``where="model"``, the call of a module opens a region that casts. So does that of a checkpointed function, which
runs again in backward. Under either setting, a backward pass opens a region that casts in two places only: where a
forward is computed again, and in the `backward` of a `torch.autograd.Function`. Hooks of gradients are outside of the
model. Compiled code counts as a forward, whoever calls it. A module inside opens no region there, and Dynamo is told
that nobody has patched `Module.__call__`.

- Casts are off in code that runs outside of the model (`op_facts.OUTSIDE_THE_MODEL`: schedulers, clipping, data
  loading) and in some code inside it (`INSIDE_THE_MODEL`). Modules that are not imported yet are patched at import.
- A layer's check of its input's dtype accepts an input that will be cast.
- Activation checkpointing, and a future, run a stored function in the region in which it was stored.
- A function in `op_facts.NO_LOW_FUNCTIONS` takes mixed dtypes, and says why torch refuses BF16.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state, run_in_region
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import when_imported, with_dynamo
from hmpx.base.raw import with_subclasses
from hmpx.base.torch_private import CHECKPOINTING, HOOKS, RECURRENT, has, lacks, private
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.policy import Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.rebinding import Rebinding
from hmpx.ops.wrapping.overriding import call, called_by_torch, stand_in
from hmpx.ops.wrapping.rules import call_cast, cast, is_explicit
from hmpx.ops.wrapping.switch import CASTS, SCOPE, Switch, in_forward, is_cast_backward, is_model, run_first
from hmpx.ops.wrapping.wrappers import (
    Patch,
    Patches,
    Patching,
    build_explaining,
    named_like,
    patch_at,
    patch_of,
    uncast_inside,
)

_BACKWARD = "torch.autograd._engine_run_backward"  # `backward` and `grad` call it, even if others have patched them
_BACKWARDS = (_BACKWARD,) if has(_BACKWARD) else ("torch.autograd.backward", "torch.autograd.grad")
_CHECKPOINT = "torch.utils.checkpoint.checkpoint"
_CALL = "torch.nn.Module.__call__"
_REFUSING = Signature(refuses_mixed=True)
_WAYS = tuple(f"torch.nn.Module.{name}" for name in ("_wrapped_call_impl", "_compiled_call_impl", "_call_impl"))
_HOOKS = "BackwardHookFunctionBackward"  # the node in which a module's own backward hooks run, and nothing else
_DYNAMO_CALL = "unpatched_nn_module_call"  # if `Module.__call__` equals it, Dynamo goes straight to `forward`


class OutsideModel:
    """Makes the patches of this file for one conversion. All names of a function have the same wrapper."""

    def __init__(self, switch: Switch) -> None:
        self._switch, self._places = switch, places()
        self._wrappers: dict[int, Callable] = {}

    def patches(self) -> Iterator[Patch]:
        """Yield the patches for every imported module."""
        switch = self._switch
        for path in _BACKWARDS:
            yield patch_at(path, Patching.BACKWARD, functools.partial(_running, run_in_region.run_backward, switch))
        if not switch.everywhere:
            running = functools.partial(_running, run_in_region.run_forward, switch)
            yield patch_at(_CHECKPOINT, Patching.FORWARD, running)
            yield patch_at(_CALL, Patching.FORWARD, functools.partial(_calling, switch))
        for module in self._places:
            if module in sys.modules:
                yield from self._uncast_in(module)
        for path in op_facts.NO_LOW_FUNCTIONS:
            yield patch_at(path, Patching.EXPLAINED, functools.partial(_mixing, path, switch))
        for path, weights in op_facts.INPUT_CHECKS.items() if RECURRENT.is_on() else ():
            yield patch_at(path, Patching.CHECK, functools.partial(_checking, weights, switch))
        for path, position in op_facts.CALLED_LATER.items() if CHECKPOINTING.is_on() else ():
            yield patch_at(path, Patching.CARRYING, functools.partial(_carrying, position, switch))

    def _uncast_in(self, module: str) -> Iterator[Patch]:
        for owner, attribute, path in functions_in(module, self._places):
            yield patch_of(owner, attribute, path, Patching.UNCAST, functools.partial(self._uncast, path))

    def _uncast(self, path: str, original: Callable) -> Callable:
        if id(original) not in self._wrappers:
            self._wrappers[id(original)] = _uncast(path, original, self._switch)
        return self._wrappers[id(original)]

    def apply(self, changes: Changes, rebinding: Rebinding, told: Callable[..., object]) -> None:
        """Tell Dynamo and autograd of models. Patch modules when they are imported, until `changes` are undone.

        told: is called with the patches of each such module.
        """
        if not self._switch.everywhere:
            _tell_dynamo(changes)
        _mark_functions(changes)
        for name in op_facts.CALLED_WHEN_DONE if HOOKS.is_on() else ():
            future, label = private("torch._C.Future"), f"torch._C.Future.{name}"
            changes.put(Attribute(future, name, label), _carrying(1, self._switch, vars(future)[name]))
        self._changes, self._rebinding, self._told = changes, rebinding, told
        for module in self._places:
            if module not in sys.modules:
                when_imported(module, self._take, changes)

    def _take(self, module: ModuleType) -> None:
        """Patch a module that has just been imported; nobody can have captured a name of it yet."""
        patches = Patches(self._uncast_in(module.__name__))
        self._rebinding.expect(patches.replacements)
        patches.apply(self._changes)
        self._told(*patches.patches)


# Where a model runs


def _tell_dynamo(changes: Changes) -> None:
    """Let Dynamo take the patched `Module.__call__` for torch's own, until `changes` are undone."""

    def tell(dynamo: ModuleType) -> None:
        for module in (dynamo.utils, dynamo.variables.nn_module):
            if has(path := f"{module.__name__}.{_DYNAMO_CALL}"):
                changes.put(Attribute(module, _DYNAMO_CALL, path), torch.nn.Module.__call__)

    with_dynamo(tell, changes)


def _calling(switch: Switch, original: Callable) -> Callable:
    """Return a `Module.__call__` that opens a region as `run_in_region.run_forward` does, but faster.

    It calls what torch's own `__call__` would call next: one frame more would cost a fifth of a call.
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
            leave()  # an interrupt may have come before `finally`, or in it
            raise

    return call


def _call_elsewhere(switch: Switch, original: Callable, module: torch.nn.Module, args: tuple, kwargs: dict) -> Any:
    """Call a module inside a region, a module that runs for the first time, or one that is no model."""
    run = run_in_region.run_forward
    if switch.retired or is_dynamo_compiling() or region_state.acts() is not None or not is_model(module):
        return original(module, *args, **kwargs)
    if id(module) in process_state.models:
        return run(original, (module, *args), kwargs)
    return run_first(module, original, run, args, kwargs)


def _mark_functions(changes: Changes) -> None:
    """Let each node of a `torch.autograd.Function` keep the scope of its forward, and whether ops were cast there.

    `CASTS` is None if the forward ran outside of a model.
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


# What runs outside of it


def _uncast(path: str, original: Callable, switch: Switch) -> Callable:
    """Return a wrapper with casts off inside, for a Python function that `places` names."""
    inner = uncast_inside(original, run_in_region.run_outside)

    def uncast(*args, **kwargs):
        if switch.casts_off() or called_by_torch(args, kwargs, 1):
            return call(original, args, kwargs)
        return call(inner, args, kwargs)

    vars(uncast)["__wrapped__"] = original  # torch_xla patches only what has the signature of torch's function
    return named_like(uncast, path, original)


def _mixing(path: str, switch: Switch, function: Callable) -> Callable:
    """Return a function in no catalogue that takes tensors of several dtypes in that of the first dense one."""

    @stand_in(function)
    def mixing(*args, **kwargs):
        if switch.casts_off(_REFUSING, args, kwargs, Rule.FIRST_INPUT) or is_explicit(args, kwargs):
            return call(function, args, kwargs)
        return call_cast(function, Rule.FIRST_INPUT, _REFUSING, args, kwargs)

    return build_explaining(path, path, function, mixing)


def _checking(weights: str, switch: Switch, original: Callable) -> Callable:
    """Return a layer's check of its input's dtype, changed to accept inputs that will be cast."""

    @functools.wraps(original)
    def check(layer, value, *rest):
        if not switch.casts_off() or region_state.widens():
            value = cast(value, getattr(layer, weights)[0].dtype)
        return original(layer, value, *rest)

    return check


def _carrying(position: int, switch: Switch, original: Any) -> Any:
    """Wrap a torch function that stores a callback. The callback will run in the region of the call."""
    function = original.__func__ if isinstance(original, staticmethod) else original

    @functools.wraps(function)
    def carrier(*args, **kwargs):
        if len(args) > position and not switch.retired:
            casting = region_state.acts()
            if casting is None and region_state.in_backward():
                casting = is_cast_backward()
            args = (*args[:position], run_in_region.carrying(args[position], casting), *args[position + 1 :])
        return function(*args, **kwargs)

    return staticmethod(carrier) if isinstance(original, staticmethod) else carrier


@functools.cache
def places() -> dict[str, list[str]]:
    """Return, by module, the names of code in which nothing is cast. "" stands for all functions of the module."""
    found: dict[str, list[str]] = {}
    for place in (*op_facts.INSIDE_THE_MODEL, *op_facts.OUTSIDE_THE_MODEL):
        module, _, name = place.partition(":")
        found.setdefault(module, []).append(name)
    return found


def functions_in(module: str, places: Mapping[str, list[str]]) -> Iterator[tuple[Any, str, str]]:
    """Yield owner, attribute and dotted path of each function that the names of an imported module stand for."""
    for name in places[module]:
        if not name:
            for owner, attribute, path in _own_functions(sys.modules[module], module):
                if vars(owner)[attribute].__module__ in places:
                    yield owner, attribute, path
        elif not lacks(f"{module}.{name}"):
            yield from _named_functions(module, name)


def _named_functions(module: str, name: str) -> Iterator[tuple[Any, str, str]]:
    """Yield a function, a method with its overrides, or the methods of a class and of torch's subclasses of it."""
    found: Any = sys.modules[module]
    for attribute in name.split("."):
        owner, found = found, getattr(found, attribute, None)  # None in a version of torch that does not have it
    if isinstance(found, type):
        for cls in with_subclasses(found):
            if cls.__module__.startswith("torch."):
                yield from _own_functions(cls, _path(cls))
    elif isinstance(owner, type):
        for cls in with_subclasses(owner):
            if inspect.isfunction(vars(cls).get(attribute)):
                yield cls, attribute, f"{_path(cls)}.{attribute}"
    elif inspect.isfunction(found):
        yield owner, attribute, f"{module}.{name}"


def _own_functions(owner: Any, path: str) -> Iterator[tuple[Any, str, str]]:
    for attribute, value in list(vars(owner).items()):
        special = attribute.startswith("__") and attribute != "__init__"
        if inspect.isfunction(value) and not special and f"{path}.{attribute}" not in op_facts.IN_THE_MODEL:
            yield owner, attribute, f"{path}.{attribute}"


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
