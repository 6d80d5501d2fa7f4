"""Decides whether a wrapper casts here, now: the regions that are open, and whether the op is a model's.

Under ``where="model"`` an op is a model's where the forward of a model runs in this thread, or where grad mode is on
and one of its tensors requires a gradient. Five more are cast wherever they stand:

- what the `backward` of a `torch.autograd.Function` calls whose forward was cast;
- a loss (an op with a `reduction`), so that a loss under `no_grad` is computed like that of training;
- an op of the fp32 list to which low precision comes;
- an op that torch would refuse as its tensors differ in dtype, which casts elsewhere have made so;
- what compiled code calls: Dynamo traces a model.

Everything else (data, timesteps, averages, metrics, hooks of gradients) runs as torch runs it.

Inside ``torch.autocast(enabled=False)`` (an island), and in what runs beside a model (data loading), an op is left
alone. Where torch would raise because its tensors differ in dtype, as FP32 arithmetic meets BF16 weights, it is
computed in the widest. In an island that a script opens outside of a model, the forwards of modules cast.

Of modules that nothing else runs around, a model is one with parameters. A module without parameters (a metric, a loss,
a transform of data) follows the tensors of each op, as code in no module does. One whose forward writes its parameters
and returns nothing keeps an average. Either is a part of the model where a model calls it.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state
from hmpx.base.run_in_region import Opener
from hmpx.base.tensors import modules_in, own_parameters, parameters_in, tensors_in
from hmpx.base.torch_private import autograd_node, graph_task, has, version_of
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.composition import accepts
from hmpx.ops.policies.policy import LOW_RULES, Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.wrapping.callers import methods
from hmpx.ops.wrapping.rules import ELIGIBLE

WIDEN: Literal["widen"] = "widen"  # an op that is not cast, and that torch would refuse
# Attributes of the node of a `torch.autograd.Function`: whether its forward was cast, and the scope of that call.
CASTS, SCOPE = "_hmpx_casts", "_hmpx_scope"
_CASTS_OF_CUSTOM_FWD = "_fwd_used_autocast"  # where torch.amp.custom_fwd leaves it
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_NONE: Mapping[str, Any] = types.MappingProxyType({})
_counts_writes = has("torch.Tensor._version")
Module = torch.nn.Module


class Switch:
    """Whether the wrappers of one conversion are alive. A wrapper that outlives its conversion is inert.

    everywhere: whether every op is cast, and not the model's alone.
    off: whether the conversion is over, or casts are off in some thread or task.
    retired: whether the conversion is over.
    """

    __slots__ = ("everywhere", "off", "retired")

    def __init__(self, everywhere: bool = True) -> None:
        self.everywhere, self.retired = everywhere, False
        self.off = process_state.off

    def retire(self) -> None:
        self.retired = True
        region_state.retire()

    def casts_off(
        self, signature: Signature | None = None, args: tuple = (), kwargs: Mapping = _NONE, rule: Rule | None = None
    ) -> bool | Literal["widen"]:
        """Return whether a call is left as it is, or `WIDEN`. Without a signature it counts as one of the model.

        rule: of the op; one of the fp32 list acts wherever a tensor of low precision comes.
        """
        if self.retired:
            return True
        if self.everywhere and not (region_state.traced.inside or self.off.any):
            return False
        region = region_state.innermost()
        if region.casting is not None:
            refused = signature is not None and region_state.widens() and _is_refused(signature, args, kwargs)
            return WIDEN if refused else not region.casting
        acts = region_state.acts()
        if acts is not None or signature is None:
            return acts is False
        always = signature.loss or _is_refused(signature, args, kwargs)
        if is_dynamo_compiling():
            return region.island and not always
        frame = sys._getframe(1)
        if region.island:
            return not (in_forward(frame) or always)
        return not (always or (rule is Rule.FP32 and _comes_low(args, kwargs)) or is_models(args, kwargs, frame))


def is_outside(op: str, args: tuple, kwargs: Mapping[str, Any], frame: types.FrameType) -> bool:
    """Return whether an op that is cast is no model's, and is cast because every op is, and not by a region."""
    if region_state.innermost().casting is not None or region_state.acts() is not True or _is_loss(op):
        return False
    return not is_models(args, kwargs, frame)


@functools.cache
def _is_loss(op: str) -> bool:
    return op in catalog() and any(entry.signature.loss for entry in catalog()[op].entries)


def is_models(args: tuple, kwargs: Mapping[str, Any], frame: types.FrameType | None) -> bool:
    """Return whether an op with these arguments, called in `frame`, is a model's."""
    if graph_task() != -1:  # in a backward pass: forwards that are computed again have opened a region
        return is_cast_backward() is True
    in_average = False
    for module, method in methods(frame):
        if id(module) in process_state.averages:
            in_average = True  # unless a model has called it
        elif method == "forward" and is_model(module):
            return True
    if in_average or not torch.is_grad_enabled():
        return False
    return any(tensor.requires_grad for tensor in tensors_in((*args, *kwargs.values())))


def is_cast_backward() -> bool | None:
    """Return whether the `backward` of a function runs whose forward was cast; None if that was outside of a model."""
    node = autograd_node()
    if not isinstance(node, BackwardCFunction):  # a hook
        return False
    return getattr(node, _CASTS_OF_CUSTOM_FWD, True) and getattr(node, CASTS, True)


def forward_scope() -> int:
    """Return the scope of the forward whose `backward` runs; 0 elsewhere, and where a forward is computed again."""
    node = autograd_node() if region_state.in_backward() and region_state.innermost().casting is None else None
    return getattr(node, SCOPE, 0) if isinstance(node, BackwardCFunction) else 0


def _comes_low(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return whether low precision comes to a call; a hook of a gradient may not return another dtype."""
    if graph_task() != -1 and is_cast_backward() is False:
        return False
    return any(tensor.dtype in LOW_RULES for tensor in tensors_in((*args, *kwargs.values())))


def is_in_model(frame: types.FrameType) -> bool:
    """Return whether code that runs in `frame` is a model's: inside of the forward of a module."""
    region = region_state.innermost()
    if region.casting is not None and not isinstance(getattr(region, "owner", None), Opener):
        return True  # in the region of a forward
    if graph_task() != -1:
        return is_cast_backward() is not False
    return in_any_forward(frame)


def _is_refused(signature: Signature, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return whether torch would raise because the tensors of a call differ in dtype."""
    values = (*args, *kwargs.values())
    if not signature.refuses_mixed or not _has_other(values, _first_dtype(values)):
        return False
    takes = signature.takes_mixed
    return takes is None or not accepts(takes, args, dict(kwargs))


def _first_dtype(values: Any) -> torch.dtype | None:  # this and the next make no list: one would be a side effect to
    for value in values:  # Dynamo, which traces them in the bodies of higher-order ops
        if isinstance(value, torch.Tensor):
            if value.dtype in ELIGIBLE:
                return value.dtype
        elif isinstance(value, (list, tuple)) and (found := _first_dtype(value)) is not None:
            return found
    return None


def _has_other(values: Any, dtype: torch.dtype | None) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.dtype is not dtype and value.dtype in ELIGIBLE:
                return True
        elif isinstance(value, (list, tuple)) and _has_other(value, dtype):
            return True
    return False


def in_forward(frame: types.FrameType | None) -> bool:
    """Return whether the forward of a model is among the callers: one that was called by hand opens no region.

    A forward that runs a backward pass does not decide for what runs in that.
    """
    if graph_task() != -1:
        return is_cast_backward() is True
    return any(method == "forward" and is_model(module) for module, method in methods(frame))


def in_any_forward(frame: types.FrameType | None) -> bool:
    """Return whether the forward of a module, which need not be a model, is among the callers.

    A module may have other methods, a training loop among them (the trainers of ultralytics, a `training_step`).
    """
    return any(method in ("forward", "_call_impl") for _, method in methods(frame))  # the forward may have a decorator


# Which modules are models


def has_parameters(module: Module) -> bool:
    """Return whether a module, or one in it, has a parameter; a replica of DataParallel has had some."""
    return any(own_parameters(each) or vars(each).get("_former_parameters") for each in modules_in(module))


def is_model(module: Module) -> bool:
    """Return whether the forward of a module that is outermost is a model's."""
    return id(module) in process_state.models or (id(module) not in process_state.averages and has_parameters(module))


def run_first(module: Module, forward: Callable, cast: Callable, args: tuple, kwargs: dict) -> Any:
    """Make the first call of a module that has parameters, and note whether it is a model or keeps an average.

    What the call has done decides; a call that raises decides nothing.

    forward: the call. cast: runs it as the forward of a model. A forward that is handed weights, and whose code returns
    nothing, is not run so this time: it may be the first update of an average.
    """
    params = [p for p in parameters_in(module) if type(p) is torch.nn.Parameter and not p.is_inference()]
    before = list(map(version_of, params))
    handed = _holds((*args, *kwargs.values()), (Module, torch.nn.Parameter))
    if handed and _returns_nothing(inspect.unwrap(module.forward)):
        _note(process_state.averages, module)
        try:
            result = forward(module, *args, **kwargs)
        finally:
            process_state.averages.pop(id(module), None)
    else:
        result = cast(forward, (module, *args), kwargs)
    # ``p.data.copy_()`` counts as no write, and nothing does where torch does not count.
    written = handed or (_counts_writes and list(map(version_of, params)) != before)
    is_average = written and (result is None or result is module or isinstance(result, (int, float, str)))
    _note(process_state.averages if is_average else process_state.models, module)
    return result


def _returns_nothing(function: Callable) -> bool:
    """Return whether the code of a function returns None in all its lines."""
    steps = pairwise(dis.get_instructions(function)) if hasattr(function, "__code__") else ()
    # A line returns what the instruction before has loaded, or from Python 3.12 on a constant of its own.
    returned = [last if each.opname == "RETURN_VALUE" else each for last, each in steps if each.opname in _RETURNS]
    return bool(returned) and all(each.opname.endswith("_CONST") and each.argval is None for each in returned)


def _note(noted: dict[int, Any], module: Module) -> None:
    key = id(module)
    noted[key] = weakref.ref(module, lambda _: noted.pop(key, None))


def _holds(values: Iterable[Any], kinds: tuple[type, ...]) -> bool:
    for value in values:
        if isinstance(value, kinds):
            return True
        if isinstance(value, dict):
            value = value.values()
        if isinstance(value, (list, tuple, type({}.values()))) and _holds(value, kinds):
            return True
    return False
