"""Applies a rule to the arguments of a call: which tensors are cast, and to which dtype.

`cast_arguments` is the definition of every cast that hmpx makes, for any signature and any mixture of positional and
keyword arguments, and `call_cast` calls an op by it. `codegen` writes faster functions that do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base.tensors import ATOMS, leaves, with_items
from hmpx.base.torch_private import in_torch_func, private
from hmpx.ops.policies.composition import accepts
from hmpx.ops.policies.policy import LOW_RULES, Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.wrapping.overriding import (
    PLAIN,
    asking,
    breaks_graph,
    call,
    keep_attributes,
    lose_class,
    out_of_graph,
    overrides,
    overriding,
)
from hmpx.ops.wrapping.weight_cache import cast_weight, open_caches

Tensor = torch.Tensor
ELIGIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
_DENSE = frozenset({torch.strided, torch.jagged})  # layouts; nested tensors have either
# torch's own methods, taken before anything is patched. `x.bfloat16()` is cheaper than `x.to(torch.bfloat16)`.
_is_batched = private("torch._C._functorch.is_batchedtensor")
_VMAP, _GRAD, _JVP = (private(f"torch._C._functorch.TransformType.{name}") for name in ("Vmap", "Grad", "Jvp"))
_is_enabled, _dtype_of = private("torch._C.is_autocast_enabled"), private("torch._C.get_autocast_dtype")
_set_enabled, _set_dtype = private("torch._C.set_autocast_enabled"), private("torch._C.set_autocast_dtype")
METHODS = {torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float, torch.float16: Tensor.half}
TARGETS = {
    **{rule: dtype for dtype, rule in LOW_RULES.items()},
    Rule.FP8: torch.bfloat16,
    Rule.BF16_TO_FP32: torch.bfloat16,
    Rule.FP32: torch.float32,
}


def is_eligible(value: Any) -> bool:
    """Return whether `value` is a dense or nested floating tensor of FP32, BF16 or FP16."""
    return isinstance(value, Tensor) and value.dtype in ELIGIBLE and value.layout in _DENSE


def is_sparse(value: Any) -> bool:
    """Return whether `value` is a sparse floating tensor: neither it nor the arguments beside it are cast."""
    return isinstance(value, Tensor) and value.dtype in ELIGIBLE and value.layout not in _DENSE


def cast_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast an eligible tensor to `dtype`; for a weight, return the cast that `cached_weights()` keeps."""
    if open_caches and type(value) is torch.nn.Parameter:
        return cast_weight(value, dtype, METHODS[dtype])
    found = METHODS[dtype](value)
    if type(value) not in PLAIN:
        keep_attributes(found, value)
    return found


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the eligible tensors in `value`, in lists, tuples and mappings too; return itself if nothing changes."""
    if isinstance(value, Tensor):
        return cast_tensor(value, dtype) if value.dtype is not dtype and is_eligible(value) else value
    if type(value) in ATOMS:
        return value
    items: Any
    if isinstance(value, (list, tuple)):
        items = value
    elif isinstance(value, Mapping):
        items = list(value.values())
    else:
        return value
    new = [cast(item, dtype) for item in items]
    return value if all(a is b for a, b in zip(new, items, strict=True)) else with_items(value, new)


def eligible_dtypes(values: Iterable[Any]) -> list[torch.dtype]:
    """Return the dtypes of the eligible tensors in `values`, in order, in lists, tuples and mappings too."""
    return [value.dtype for value in leaves(values) if is_eligible(value)]


def is_explicit(args: tuple, kwargs: dict) -> bool:
    """Return whether the caller sets the result's dtype by ``out=`` or ``dtype=``."""
    return is_stated(kwargs) or has_dtype(args)


def is_stated(kwargs: dict) -> bool:
    get = kwargs.get  # the result of ``out=`` would go into a copy
    return get("dtype") is not None or get("out") is not None or get("out_dtype") is not None


def has_dtype(args: tuple) -> bool:
    for value in args:  # a loop, not any(): this runs in every call of softmax
        if type(value) is torch.dtype:
            return True
    return False


def target_dtype(rule: Rule, args: tuple, kwargs: dict) -> torch.dtype | None:
    """Return the dtype that `rule` casts the arguments to; None if it casts nothing."""
    if rule in TARGETS:
        return TARGETS[rule]
    if rule is Rule.INSIDE:
        return None
    dtypes = eligible_dtypes((*args, *kwargs.values()))
    if not dtypes:
        return None
    return dtypes[0] if rule is Rule.FIRST_INPUT else functools.reduce(torch.promote_types, dtypes)


def cast_arguments(rule: Rule, signature: Signature, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Cast the arguments by the rule, except tensors that the op may write to (`signature.statistics`)."""
    dtype = target_dtype(rule, args, kwargs)
    is_asked = rule is Rule.FIRST_INPUT or (rule is Rule.PROMOTE and signature.promotes)
    takes = signature.takes_mixed if is_asked else None
    if dtype is None or (takes is not None and accepts(takes, args, kwargs)):
        return args, kwargs
    if not signature.python and (sparse := [*filter(is_sparse, (*args, *kwargs.values()))]):
        if {*eligible_dtypes((*args, *kwargs.values()))} <= {each.dtype for each in sparse}:
            return args, kwargs
        args = tuple(METHODS[dtype](value) if is_sparse(value) else value for value in args)  # beside a dense tensor
        kwargs = {key: METHODS[dtype](value) if is_sparse(value) else value for key, value in kwargs.items()}
    if signature.in_lists:
        firsts = args[0] if args else kwargs.get("self", ())
        return tuple(_as_each(firsts, value) for value in args), {
            key: _as_each(firsts, value) for key, value in kwargs.items()
        }
    if not signature.statistics:
        return tuple(cast(value, dtype) for value in args), {key: cast(value, dtype) for key, value in kwargs.items()}
    names = [p.name for p in signature.lead or ()]
    written = {*signature.statistics, *(names[i] for i in signature.statistics if i < len(names))}
    follow = {*signature.same_dtype, *(names[i] for i in signature.same_dtype)}
    places = {**dict(enumerate(args)), **kwargs}
    theirs = next((places[key].dtype for key in places if key in written and is_eligible(places[key])), dtype)

    def fit(key: Any, value: Any) -> Any:
        return value if key in written else cast(value, theirs if key in follow else dtype)

    return tuple(fit(i, value) for i, value in enumerate(args)), {key: fit(key, value) for key, value in kwargs.items()}


def _as_each(firsts: Any, others: Any) -> Any:
    """Cast each tensor of a list to the dtype of its partner; what is no list of them stays."""
    if not isinstance(others, (list, tuple)):
        return others
    return [
        cast(other, first.dtype) if is_eligible(first) else other for first, other in zip(firsts, others, strict=False)
    ] + list(others[len(firsts) :])


def is_taken_apart(rule: Rule, signature: Signature, values: tuple) -> bool:
    """Return whether torch.func takes a product in low precision apart from what is added to it.

    It does so before torch.autocast sees the op, which then casts the product alone. Under `vmap` every op is taken
    apart that has an argument with the mapped dimension, under a derivative a `linear` whose input is no matrix.
    """
    if not signature.adds or rule not in LOW_RULES.values() or is_dynamo_compiling():
        return False
    layer = in_torch_func()
    if layer is None or not _has_autocast(device_of(values)):
        return False
    if layer.key() == _VMAP:
        return any(isinstance(t, Tensor) and _is_batched(t) for t in values)
    return (
        layer.key() in (_GRAD, _JVP) and signature.adds == "bias"
    )  # not `addmv`, which autocast leaves uncast on a CPU


def autocast_inside(low: torch.dtype, op: Callable, args: tuple, kwargs: dict) -> Any:
    """Call `op` with torch's own autocast on, and no region of `torch.autocast`, which would be one of hmpx."""
    device = device_of((*args, *kwargs.values()))
    if not _has_autocast(device):
        return call(op, args, kwargs)
    before = _is_enabled(device), _dtype_of(device)
    torch.autocast_increment_nesting()
    try:
        _set_enabled(device, True)
        _set_dtype(device, low)
        return call(op, args, kwargs)
    finally:
        _set_enabled(device, before[0])
        _set_dtype(device, before[1])
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()  # it holds the weights that were cast


def _has_autocast(device: str) -> bool:
    return bool(device) and torch.amp.is_autocast_available(device)


def device_of(values: Iterable[Any]) -> str:
    """Return the type of the device of the first tensor."""
    for value in values:
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)) and (found := device_of(value)):
            return found
    return ""


def call_cast(op: Callable, rule: Rule, signature: Signature, args: tuple, kwargs: dict) -> Any:
    """Call `op` with its arguments cast. Tensors that it writes to are updated in the caller's own storage.

    Where the class of a tensor overrides functions, and its cast is of another one or not to be had, the class is asked
    first.
    """
    if breaks_graph(op, args, kwargs):
        return out_of_graph(call_cast, op, rule, signature, args, kwargs)
    if is_taken_apart(rule, signature, (*args, *kwargs.values())):
        return autocast_inside(TARGETS[rule], op, args, kwargs)
    given = _by_position(signature, args, kwargs) if signature.statistics else (args, kwargs)
    fitting = _fitting(rule, signature, *given)
    if fitting is None:
        if torch.compiler.is_dynamo_compiling():
            return out_of_graph(call_cast, op, rule, signature, args, kwargs)
        return asking(op, functools.partial(_casting, rule, signature))(*args, **kwargs)
    args, kwargs = fitting
    if not signature.statistics:
        return call(op, args, kwargs)
    args = _with_weight(signature, args)
    args, widened = _widen(signature, args)
    result = call(op, args, kwargs)
    with torch.no_grad():
        for own, wide in widened:
            own.copy_(wide)
    return result


def _fitting(rule: Rule, signature: Signature, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Return the arguments cast; None if a cast would lose the class of a tensor that overrides functions."""
    try:
        fitting = cast_arguments(rule, signature, args, kwargs)
    except Exception:  # of a class that knows few functions, and cannot read a dtype or cast
        if overrides(args, kwargs):
            return None
        if overriding(args, kwargs):  # its class was asked, and calls the op: it has no such cast
            return args, kwargs
        raise
    return None if lose_class((args, kwargs), fitting) else fitting


def _casting(rule: Rule, signature: Signature, op: Callable) -> Callable:
    return lambda *args, **kwargs: call_cast(op, rule, signature, args, kwargs)


def _by_position(signature: Signature, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the call with its leading keyword arguments by position."""
    values, rest = list(args), dict(kwargs)
    for argument in (signature.lead or ())[len(args) :]:
        if argument.name not in rest:
            break
        values.append(rest.pop(argument.name))
    return tuple(values), rest


def _with_weight(signature: Signature, args: tuple) -> tuple:
    """Give a bias that comes without a weight one of ones, which changes no bit.

    On a CPU instance_norm takes a BF16 input beside FP32 weight and bias, and not beside an FP32 bias alone.
    """
    weight, bias = (args[i] if i < len(args) else None for i in signature.same_dtype or (len(args), len(args)))
    if weight is not None or bias is None or not is_eligible(bias):
        return args
    with torch.no_grad():
        ones = torch.ones_like(bias)
    return (*args[: signature.same_dtype[0]], ones, *args[signature.same_dtype[0] + 1 :])


def _widen(signature: Signature, args: tuple) -> tuple[tuple, list[tuple[Tensor, Tensor]]]:
    """Widen statistics that are neither FP32 nor of the input's dtype, which torch refuses; return pairs to write back.

    What stands beside them is widened with them.
    """
    group = {
        i: args[i] for i in (*signature.statistics, *signature.same_dtype) if i < len(args) and is_eligible(args[i])
    }
    if not signature.same_dtype or all(each.dtype in (torch.float32, args[0].dtype) for each in group.values()):
        return args, []
    wide = {i: cast(each, torch.float32) for i, each in group.items()}
    written = [(group[i], wide[i]) for i in signature.statistics if i in wide and wide[i] is not group[i]]
    return tuple(wide.get(i, value) for i, value in enumerate(args)), written
