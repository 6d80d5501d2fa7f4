"""What `torch.autocast` does while op lists cast: hmpx runs its regions, and answers questions about it by the lists.

Models say "FP32 here" by ``with torch.autocast(device, enabled=False):``, around rotary angles, routers, norms and
losses. Such a region is an *island* (`base.region_state`): the lists cast nothing in it. In an enabled region the lists
cast as they do around it. An enabled region inside an island ends that island. torch's own autocast stays off, so that
no op is cast twice.

- The device of a region does not count: "no autocast on cuda" in the code of a model means FP32 on any device.
- A training script opens a region with ``enabled=args.amp``, outside of every forward and of every enabled region. If
  `args.amp` is False, the forwards of modules in the region cast, and the script's own ops are left alone. A script may
  be a method of a module, such as a `fit` or a `training_step`.
- If a module opens an island and has a rule that names ops for low precision, its ops are cast all the same.
- With casts off (`disable_casts`, ``convert(enabled=False)``, an optimizer step) regions are torch's own again.

Dynamo runs no ``torch.autocast.__enter__``: its class `AutocastModeVariable` stands for a region. While torch is
converted, it traces `region_state.enter_autocast` and `leave`, with the nodes, guards and cleanup of hmpx's regions.

``custom_fwd(cast_inputs=)``, DataParallel, transformers' `maybe_autocast` and kernels that hmpx cannot reach (flash
attention, Mamba's scans) first ask whether autocast is on and in which dtype. Where hmpx casts, the answer is yes, in
the low precision of the lists. Code of torch that saves and restores the state (Dynamo, AOTAutograd, checkpointing,
CUDA graphs) gets torch's own answers: it would write hmpx's answers back, and so turn autocast on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state, run_in_region
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import never_compile, with_dynamo
from hmpx.base.raw import variables
from hmpx.base.tensors import dtype_name
from hmpx.base.torch_private import AUTOCAST, REGISTERED, private
from hmpx.ops.module_rules import lowering_rule, rules_of
from hmpx.ops.overlays import Policies
from hmpx.ops.policies.policy import LOW_RULES
from hmpx.ops.wrapping.callers import methods, modules, users_line
from hmpx.ops.wrapping.observing import say_beats_island, say_once
from hmpx.ops.wrapping.overriding import stand_in
from hmpx.ops.wrapping.rules import autocast_inside, device_of
from hmpx.ops.wrapping.switch import Switch, in_any_forward, in_forward, is_in_model, is_model
from hmpx.ops.wrapping.wrappers import Patch, Patching, patch_at

logger = logging.getLogger("hmpx")
_set_enabled = private("torch._C.set_autocast_enabled")
_is_on = torch.is_autocast_enabled  # torch's own answer
_devices = private("torch._C._autocast_supported_devices")
_SUBCLASSES = frozenset({"torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode"})  # they subclass torch.autocast
# The modules of torch that ask about autocast, or open a region, for a model. The others ask in order to restore the
# state later. hmpx need not answer them: a checkpointed function carries the region of its forward.
_FOR_MODELS = frozenset({"torch.amp.autocast_mode", "torch.nn.parallel.parallel_apply"})
_ENTER = inspect.unwrap(torch.autocast.__enter__).__code__  # it asks in order to save the state
_VARIABLE = "torch._dynamo.variables.ctx_manager.AutocastModeVariable"
# An attribute of a region: the `enabled` that the code asked for. torch's own is False where the device is unfit.
_ASKED = "_hmpx_enabled"
_NOTHING = "torch's own lists do nothing"
_TWICE = (
    "torch's own autocast is on, by torch.set_autocast_enabled or around convert(): it casts after the op lists, by "
    "lists of its own, and so decides for the ops in these; leave it out"
)
_OURS = f"torch.set_autocast_enabled(True) changes nothing here: the op lists cast, and {_NOTHING}"
_NOT_HEARD = (
    "torch.set_autocast_enabled(False) does not turn the op lists off; torch.autocast(..., enabled=False) and "
    "hmpx.disable_casts() do"
)
_IN_A_METHOD = (
    "torch.autocast(enabled=False) in {}.{}, which is no forward, is the switch of a script: models that are called in "
    "it are cast; hmpx.disable_casts() leaves them alone"
)
_IS_ENABLED = ("is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_xla_enabled", "is_autocast_ipu_enabled")
_GET_DTYPE = ("get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "get_autocast_xla_dtype")
_SET = tuple(f"set_{name.removeprefix('is_')}" for name in _IS_ENABLED)
_SET_DTYPE = tuple(f"set_{name.removeprefix('get_')}" for name in _GET_DTYPE)


def _governs() -> bool:
    """Return whether hmpx, and not torch, runs a `torch.autocast` region that opens here."""
    return process_state.converted and (region_state.acts() is not False or region_state.innermost().island)


def _is_for_a_model(frame: FrameType) -> bool:
    """Return whether the code in `frame` acts for a model: torch's own code may ask in order to restore the state."""
    name = frame.f_globals.get("__name__", "")
    return name[:6] != "torch." or (name in _FOR_MODELS and frame.f_code is not _ENTER)


def in_enabled_region() -> bool:
    """Return whether an enabled `torch.autocast` region is open here."""
    return any(isinstance(each.owner, torch.autocast) and not each.island for each in region_state.open_regions())


# Regions


class AutocastRegions:
    """Lets hmpx run the regions of `torch.autocast`, for one conversion."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._open: dict[int, region_state.Region] = {}  # by identity

    def apply(self, changes: Changes) -> None:
        """Let hmpx run regions until `changes` are undone. Regions that are open at that time become torch's."""
        if any(map(_is_on, _devices())):
            say_once(logging.WARNING, _TWICE, sys._getframe())
        with_dynamo(_fold, changes)
        if not AUTOCAST.is_on():
            return
        changes.callback(self._end)
        cls = torch.autocast
        for name, build in (("__init__", _noting), ("__enter__", self._entering), ("__exit__", self._leaving)):
            method = build(vars(cls)[name])
            never_compile(method)
            changes.put(Attribute(cls, name, f"torch.autocast.{name}"), method)
        with_dynamo(functools.partial(_trace_regions, changes), changes)

    def _end(self) -> None:
        for region in list(self._open.values()):
            region_state.leave(region)
        self._open.clear()

    def _entering(self, enter: Callable) -> Callable:
        @functools.wraps(enter)
        def entering(region):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _SUBCLASSES:
                frame = frame.f_back
            if not (_is_for_a_model(frame) and _governs()):
                return enter(region)
            casts = _was_enabled(region, region._enabled) and region.fast_dtype in LOW_RULES
            if casts:
                _enter_switched_off(enter, region)
                self._say(region, frame)
            else:
                enter(region)
                casts = _is_overruled(frame)
            in_model = casts or is_in_model(frame) or in_enabled_region()
            if not in_model and (method := next(methods(frame), None)) is not None:
                _say_switch(*method, frame)
            own = region_state.enter_autocast(casts, in_model, region)
            self._open[id(own)] = own
            if process_state.observer is not None:
                own.where = users_line(frame)
            return region

        return entering

    def _leaving(self, exit_: Callable) -> Callable:
        @functools.wraps(exit_)
        def leaving(region, *exception):
            try:
                return exit_(region, *exception)
            finally:
                own = region_state.owned_by(region)
                if own is not None:
                    region_state.leave(own)
                    self._open.pop(id(own), None)

        return leaving

    def _say(self, region: torch.autocast, frame: FrameType) -> None:
        low = self._policies.at(region_state.scope()).low_precision
        if region.fast_dtype is not low:
            dtypes = f"to {dtype_name(low)} and not to {dtype_name(region.fast_dtype)}"
            say_once(logging.WARNING, f"in this torch.autocast the op lists cast, {dtypes}; {_NOTHING}", frame)
        elif logger.isEnabledFor(logging.INFO) and not in_forward(frame):
            say_once(logging.INFO, f"in this torch.autocast the op lists cast; {_NOTHING}", frame)


def _noting(init: Callable) -> Callable:
    @functools.wraps(init)
    def noting(region, *args, **kwargs):
        vars(region)[_ASKED] = bool(kwargs["enabled"] if "enabled" in kwargs else args[2] if len(args) > 2 else True)
        init(region, *args, **kwargs)

    return noting


def _was_enabled(region: torch.autocast, enabled: bool) -> bool:
    """Return the `enabled` that the code asked for; the argument, if the region is older than the conversion."""
    return vars(region).get(_ASKED, enabled)


def _is_overruled(frame: FrameType) -> bool:
    """Return whether a rule of the module whose code opens an island in `frame` has ops cast all the same."""
    module = next(modules(frame), None)
    rule = None if module is None else lowering_rule(rules_of(module))
    if rule is not None:
        say_beats_island(f"the rule for this {type(module).__name__} ({rule.where})", frame)
    return rule is not None


def _say_switch(module: torch.nn.Module, method: str, frame: FrameType) -> None:
    """Log that a region in a method of a module is not taken for the word of a model, if `frame` is of that method."""
    if any(variables(frame).get(name) is module for name in frame.f_code.co_varnames[:1]):
        say_once(logging.WARNING, _IN_A_METHOD.format(type(module).__name__, method), frame)


def _enter_switched_off(enter: Callable, region: torch.autocast) -> None:
    """Enter a region as a disabled one, so that torch's exit can undo it; then turn autocast back to what it was.

    Threads share the region of a decorator, so its `_enabled` may not change, and a copy is entered.
    """
    other = object.__new__(type(region))
    vars(other).update(vars(region), _enabled=False)
    enter(other)
    vars(region).update(vars(other), _enabled=region._enabled)
    _set_enabled(region.device, region.prev)


# Regions in code that Dynamo traces


def _trace_regions(changes: Changes, dynamo: ModuleType) -> None:
    variable = dynamo.variables.ctx_manager.AutocastModeVariable
    enter, leave = variable.enter, variable.exit

    def entering(self: Any, tx: Any) -> Any:
        if not _inlined(tx, _governs).as_python_constant():
            return enter(self, tx)
        _, dtype, enabled, _ = self.target_values
        if self.source is not None and hasattr(tx.output, "resolve_source_value"):  # a decorator's; needs torch 2.13
            enabled = _was_enabled(tx.output.resolve_source_value(self.source), enabled)
        inside = list(_modules(tx))
        casts = (enabled and dtype in (None, *LOW_RULES)) or bool(inside and lowering_rule(rules_of(inside[0])))
        opened = vars(tx.output).setdefault("hmpx_regions", [])  # whether each casts; None: the models in it do
        in_model = casts or inside or any(opened) or in_enabled_region() or in_any_forward(sys._getframe())
        opened.append(casts if in_model else None)
        self.hmpx_region = _aside(tx, region_state.enter_autocast, casts, bool(in_model))
        return _build(tx, None)

    def leaving(self: Any, tx: Any, *exception: Any) -> Any:
        if getattr(self, "hmpx_region", None) is None:
            return leave(self, tx, *exception)
        region, self.hmpx_region = self.hmpx_region, None
        tx.output.hmpx_regions.pop()
        return _aside(tx, region_state.leave, region)

    for name, value in (("enter", entering), ("exit", leaving)):
        changes.put(Attribute(variable, name, f"{_VARIABLE}.{name}"), value)
    models = dynamo.variables.nn_module
    for owner in (models.NNModuleVariable, models.UnspecializedNNModuleVariable):
        label = f"{models.__name__}.{owner.__name__}.call_function"
        changes.put(Attribute(owner, "call_function", label), _tracing_call(owner.call_function))


def _tracing_call(call: Callable) -> Callable:
    """Let a model that traced code calls be cast where the script has opened an island around it, as in eager code."""

    @functools.wraps(call)
    def tracing(self: Any, tx: Any, *args: Any) -> Any:
        opened = vars(tx.output).get("hmpx_regions")
        if not opened or opened[-1] is not None or not is_model(_value(self, tx)):
            return call(self, tx, *args)
        opened.append(True)
        region = _aside(tx, region_state.enter, True)
        result = call(self, tx, *args)
        _aside(tx, region_state.leave, region)
        opened.pop()
        return result

    return tracing


def _modules(tx: Any) -> Iterator[torch.nn.Module]:
    """Yield the modules whose methods Dynamo inlines, innermost first."""
    while tx is not None:
        code = tx.f_code
        name = code.co_varnames[0] if code.co_argcount else ""
        if (name == "self" or code.co_name == "forward") and name in tx.symbolic_locals:
            module = _value(tx.symbolic_locals[name].realize(), tx)
            if isinstance(module, torch.nn.Module):
                yield module
        tx = getattr(tx, "parent", None)


def _value(variable: Any, tx: Any) -> Any:
    """Return the module that Dynamo's variable stands for; None of another variable."""
    if getattr(variable, "value", None) is None and hasattr(variable, "module_key"):
        return tx.output.get_submodule(variable.module_key)
    return getattr(variable, "value", None)


def _aside(tx: Any, function: Callable, *args: Any) -> Any:
    """Let Dynamo trace a call with side effects that the traced code undoes before it ends, as a region does.

    In the body of an autograd function, Dynamo would else return every tensor that is made there, and raise for views.
    """
    tracer = tx.output.current_tracer
    before = getattr(tracer, "side_effect_stack", None)  # none before torch 2.13
    result = _inlined(tx, function, *args)
    tracer.side_effect_stack = before
    return result


def _inlined(tx: Any, function: Callable, *args: Any) -> Any:
    """Let Dynamo trace a call, with constants and what other calls returned."""
    given = [value if hasattr(value, "as_proxy") else _build(tx, value) for value in args]
    return _build(tx, function).call_function(tx, given, {})


def _build(tx: Any, value: Any) -> Any:
    return private("torch._dynamo.variables.base.VariableTracker.build")(tx, value)


# Answers to code that asks about autocast


def low_precision(policies: Policies, scope: int) -> torch.dtype | None:
    """Return the low precision in which lists cast in a scope; None if no op is listed for it."""
    policy = policies.at(scope)
    return policy.low_precision if policy.bf16 or policy.fp8 or policy.bf16_to_fp32 else None


def questions(switch: Switch, policies: Policies) -> Iterator[Patch]:
    """Yield patches of the functions that say whether autocast is on and in which dtype, and of those that set it."""

    def low(scope: int) -> torch.dtype | None:
        return low_precision(policies, scope)

    vars(low)["_dynamo_marked_constant"] = True  # it depends on nothing but the scope

    def answering(is_dtype: bool, original: Callable) -> Callable:
        @functools.wraps(original)
        def answer(*args, **kwargs):
            if not is_dynamo_compiling() and sys._getframe(1).f_code is _ENTER:
                return original(*args, **kwargs)
            if args or kwargs:
                found = original(*args, **kwargs)  # this raises for an unknown device
            if not switch.retired and (is_dynamo_compiling() or _is_for_a_model(sys._getframe(1))) and casts_here():
                dtype = low(region_state.scope())
                if dtype is not None:
                    return dtype if is_dtype else True
            return found if args or kwargs else original()

        return answer

    def telling(is_dtype: bool, original: Callable) -> Callable:
        @functools.wraps(original)
        def setting(*args, **kwargs):
            frame = None if is_dynamo_compiling() or switch.retired else sys._getframe(1)
            if frame is None or frame.f_globals.get("__name__", "").startswith("torch.") or not _governs():
                original(*args, **kwargs)
                return
            given, dtype = (*args, *kwargs.values()), low(region_state.scope()) if casts_here() else None
            if dtype is not None and any(value is (dtype if is_dtype else True) for value in given):
                if not is_dtype:  # code that has asked before writes our own answer back
                    say_once(logging.INFO, _OURS, frame)
                return
            was_on = any(map(_is_on, _devices()))
            original(*args, **kwargs)
            if is_dtype:
                return
            if True in given:
                say_once(logging.WARNING, _TWICE, frame)
            elif not was_on and is_in_model(frame) and casts_here():
                say_once(logging.WARNING, _NOT_HEARD, frame)

        return setting

    builds: dict[tuple[str, ...], Callable[[Any], Any]] = {
        _IS_ENABLED: functools.partial(answering, False),
        _GET_DTYPE: functools.partial(answering, True),
        _SET: functools.partial(telling, False),
        _SET_DTYPE: functools.partial(telling, True),
    }
    for names, build in builds.items():
        for name in names:
            if hasattr(torch, name):
                yield patch_at(f"torch.{name}", Patching.AUTOCAST, build)


def casts_here() -> bool:
    """Return whether an op that the asking code calls now is cast."""
    acts = region_state.acts()
    if acts is not None or is_dynamo_compiling():
        return acts is not False and process_state.converted
    return process_state.converted and (in_enabled_region() or in_forward(sys._getframe(2)))


def _fold(dynamo: ModuleType) -> None:
    """Put torch's own functions into Dynamo's table of constants, if Dynamo made it while hmpx's stood in torch."""
    table = dynamo.variables.torch.constant_fold_functions
    for name in (*_IS_ENABLED, *_GET_DTYPE):
        ours = getattr(torch, name, None)
        if ours is not None and ours in table and (original := inspect.unwrap(ours)) is not ours:
            del table[ours]
            table[original] = None


# Operators that their authors have registered for autocast

_has_kernel = private("torch._C._dispatch_has_kernel_for_dispatch_key")
_key_of = private("torch._C._dispatch_key_for_device")
_OF_TORCH = ("aten::", "prim::", "prims::", "profiler::", "hmpx::")  # a step of an optimizer calls two of the profiler


def operator_patches(switch: Switch, policies: Policies) -> Iterator[Patch]:
    """Yield the patches of the two classes by which Python calls an operator."""
    names = {"OpOverload": "_name", "OpOverloadPacket": "_qualified_op_name"}  # a missing attribute of a packet is slow
    for each, attribute in names.items() if REGISTERED.is_on() else ():
        build = functools.partial(_calling, switch, policies, attribute)
        yield patch_at(f"torch._ops.{each}.__call__", Patching.AUTOCAST, build)


def _calling(switch: Switch, policies: Policies, attribute: str, original: Callable) -> Callable:
    @functools.wraps(original)
    def __call__(operator, /, *args, **kwargs):
        name = getattr(operator, attribute)
        if name.startswith(_OF_TORCH) or switch.retired or not casts_here():
            return original(operator, *args, **kwargs)
        low = low_precision(policies, region_state.scope())
        if low is None or not _is_registered(operator, name, device_of((*args, *kwargs.values()))):
            return original(operator, *args, **kwargs)

        @stand_in(original, computes=False)
        def as_registered(*args: Any, **kwargs: Any) -> Any:
            return original(operator, *args, **kwargs)

        return run_in_region.run_uncast(autocast_inside, (low, as_registered, args, kwargs), {})

    return __call__


def _is_registered(operator: Any, name: str, device: str) -> bool:
    """Return whether one of the overloads that this may call has a kernel for autocast on the device."""
    if not device:
        return False
    overloads = operator.overloads() if hasattr(operator, "overloads") else [""]
    names = {f"{name}.{each}".removesuffix(".default").removesuffix(".") for each in overloads}
    return any(_has_kernel(each, f"Autocast{_key_of(device)}") for each in names)
