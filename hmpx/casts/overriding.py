"""Calls of torch's functions with tensors of a class that overrides them, by ``__torch_function__``.

The class is handed the function that torch has made, as without hmpx: it may look for it in a table that is older than
the conversion. Where it compares the function with what a name leads to now, ``func is torch.nn.functional.linear``, or
with what a younger table has, that is a wrapper of ours, and then it is handed this one. torch's own biases of causal
attention and nested tensors do so; handed anything else, the first lose their mask.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides

from hmpx import region_state
from hmpx.casts import op_facts
from hmpx.casts.callers import calling
from hmpx.casts.dynamo import ask_once, never_compile
from hmpx.casts.look_ups import functions_of

Tensor = torch.Tensor
PLAIN = frozenset({Tensor, torch.nn.Parameter})  # classes that override nothing
# Where torch's compiler spells ops out in other ops, which are no calls of the user's.
COMPILER = tuple(
    f"torch.{name}."
    for name in (
        *("_decomp", "_functorch", "_higher_order_ops", "_inductor", "_library", "_meta_registrations", "_prims"),
        *("_prims_common", "_refs", "_subclasses", "fx.experimental"),
    )
)


def call(op: Callable, args: tuple, kwargs: dict) -> Any:
    """Call torch's own function `op`. A tensor subclass that overrides functions is handed it as without hmpx.

    torch itself looks the function up by its name to hand it to ``__torch_function__``, and would find the wrapper. A
    stand-in for a function, which has the attribute `hands_on`, calls it in this way itself.
    """
    if breaks_graph(op, args, kwargs):
        return out_of_graph(call, op, args, kwargs)
    subclasses = _subclasses(args, kwargs)
    if subclasses and torch.overrides.has_torch_function(subclasses) and not hasattr(op, "hands_on"):
        function = handed(op, *map(type, subclasses))
        return torch.overrides.handle_torch_function(function, subclasses, *args, **kwargs)
    return op(*args, **kwargs)


def _subclasses(args: tuple, kwargs: dict) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, Tensor) and type(item) not in PLAIN:
                found.append(item)
    return found


def breaks_graph(op: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether Dynamo traces this call and cannot: a class compares `op` with a wrapper, which is no op to Dynamo."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    classes = [type(item) for item in _subclasses(args, kwargs)]
    return bool(classes) and _is_compared(op, *classes)


def _is_compared(op: Callable, *classes: type) -> bool:
    return handed(op, *classes) is not public(op)


def out_of_graph(function: Callable, *args: Any) -> Any:
    """The call as it is in eager code."""
    return function(*args)


ask_once(_is_compared)
never_compile(out_of_graph)


class _Probe(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func


@functools.cache
def public(op: Callable) -> Callable:
    """What torch hands to ``__torch_function__`` for `op`: for the operator ``x @ y`` it is ``Tensor.matmul``."""
    if not (op.__name__.startswith("__") and isinstance(op, types.MethodDescriptorType)):
        return op
    probe = torch.empty(0).as_subclass(_Probe)
    try:
        found = op(probe) if op.__name__ in op_facts.OPERANDS else op(probe, probe)
    except TypeError:
        return op
    return getattr(found, "__hmpx_original__", found)


def handed(op: Callable, *classes: type) -> Callable:
    """What torch hands to these classes for `op`, or the wrapper of that which one of them compares it with.

    A table that is older than the conversion has the first, one that is younger the second.
    """
    op, wrapper = public(op), None
    for cls in classes:
        for each in functions_of(cls):
            if each is op:
                return op
            if isinstance(each, types.FunctionType) and getattr(each, "__hmpx_original__", None) is op:
                wrapper = each
    return wrapper or op


def called_by_torch(args: tuple, kwargs: dict, above: int) -> bool:
    """Whether a tensor that is no plain one comes from torch's own decompositions, while it compiles.

    Args:
        above: how many frames above the one that asks the caller is.
    """
    if not any(isinstance(a, torch.Tensor) and type(a) not in PLAIN for a in (*args, *kwargs.values())):
        return False
    if torch.compiler.is_dynamo_compiling():  # it traces code of the user's, and cannot trace a look at frames
        return False
    if region_state.casts_off_in_graph():
        return True
    return (calling(sys._getframe(above + 1)).f_globals.get("__name__", "") + ".").startswith(COMPILER)


def keep_attributes(cast: Tensor, value: Tensor) -> None:
    """Give the cast of a tensor what that has beside its numbers: a bias of causal attention has nothing else."""
    if type(cast) is type(value) and not torch.compiler.is_dynamo_compiling():
        with contextlib.suppress(TypeError):  # no tensor of this class has anything
            vars(cast).update({key: kept for key, kept in vars(value).items() if key not in vars(cast)})
