"""One wrapper built for each (entry point, rule): look at the arguments, cast what the rule says, call torch.

`_compile` writes, for an op whose layout is known, a plain Python function with the op's own leading parameters that
makes the casts of `cast_arguments` with one `type` and one `dtype` look at each; everything unusual (a subclass, a
missing argument, a list) goes back to the definition. Plain functions beat `*args` walks, wrapt proxies and
`TorchFunctionMode` in Python's interpreter, and the unlisted op costs nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from hmpx import scope
from hmpx.casting import (
    ELIGIBLE,
    METHODS,
    TARGETS,
    cast,
    cast_arguments,
    has_dtype,
    is_eligible,
    is_explicit,
    is_stated,
)
from hmpx.catalog import Entry, Layout
from hmpx.policy import Rule

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# Where torch's compiler spells ops out in other ops, which are no calls of the user's.
_COMPILER = tuple(
    f"torch.{name}."
    for name in (
        *("_decomp", "_functorch", "_higher_order_ops", "_inductor", "_library", "_meta_registrations", "_prims"),
        *("_prims_common", "_refs", "_subclasses", "fx.experimental"),
    )
)


def called_by_torch(args: tuple, kwargs: dict, caller: types.FrameType) -> bool:
    """Whether a tensor that is no plain one comes from torch's own decompositions, while it compiles."""
    if not any(isinstance(a, torch.Tensor) and type(a) not in _PLAIN for a in (*args, *kwargs.values())):
        return False
    return scope.casts_off_in_graph() or (caller.f_globals.get("__name__", "") + ".").startswith(_COMPILER)


Observer = Callable[[tuple, tuple, Any], None]  # (arguments given, arguments the op saw, result)


class Switch:
    """Whether the wrappers of one conversion are alive. A wrapper that outlives its conversion is inert."""

    __slots__ = ("retired",)

    def __init__(self) -> None:
        self.retired = False

    def casts_off(self) -> bool:
        return self.retired or bool(scope.off_somewhere and scope.casts_off())


def _stage(layout: Layout, args: tuple) -> tuple[tuple, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Widen statistics that are narrower than the input, which torch refuses; the pairs say what to write back."""
    staged = []
    values = list(args)
    if layout.beside and values and is_eligible(values[0]) and values[0].dtype is torch.float32:
        for i in (*layout.statistics, *layout.beside):
            if i < len(values) and is_eligible(values[i]) and values[i].dtype is not torch.float32:
                wide = cast(values[i], torch.float32)
                if i in layout.statistics:
                    staged.append((values[i], wide))
                values[i] = wide
    return tuple(values), staged


def _by_position(layout: Layout, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The call with its leading keyword arguments in their places."""
    values, rest = list(args), dict(kwargs)
    for argument in (layout.lead or ())[len(args) :]:
        if argument.name not in rest:
            break
        values.append(rest.pop(argument.name))
    return tuple(values), rest


def _with_statistics(entry: Entry, rule: Rule, original: Callable, switch: Switch) -> Callable:
    """Ops that write to tensors beside their input: the caller's own buffers are what gets updated."""
    layout = entry.layout

    def wrapper(*args, **kwargs):
        if switch.casts_off() or called_by_torch(args, kwargs, sys._getframe(1)):
            return original(*args, **kwargs)
        args, kwargs = cast_arguments(rule, layout, *_by_position(layout, args, kwargs))
        args, staged = _stage(layout, args)
        result = original(*args, **kwargs)
        with torch.no_grad():
            for own, wide in staged:
                own.copy_(wide)
        return result

    return wrapper


def _general(entry: Entry, rule: Rule, original: Callable, switch: Switch) -> Callable:
    """Any layout; also Python functions of torch, inside of which nothing is cast again."""
    layout = entry.layout
    stated = _stated_positions(original) if layout.python else ()

    def wrapper(*args, **kwargs):
        if switch.casts_off() or called_by_torch(args, kwargs, sys._getframe(1)):
            return original(*args, **kwargs)
        decided = is_explicit(args, kwargs) or kwargs.get("inplace") or _is_stated_at(stated, args)
        if rule is not Rule.UNCAST and not decided:
            args, kwargs = cast_arguments(rule, layout, args, kwargs)
        if layout.python:
            return scope.run_uncast(original, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _stated_positions(function: Callable) -> tuple[int, ...]:
    """Where a Python function of torch takes `out`, `dtype` and `inplace`, by which a caller decides for himself."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    return tuple(names.index(name) for name in ("out", "dtype", "inplace") if name in names)


def _is_stated_at(positions: tuple[int, ...], args: tuple) -> bool:
    return any(i < len(args) and args[i] is not None and args[i] is not False for i in positions)


def build_check(original: Callable, weights: str, switch: Switch) -> Callable:
    """A layer's check of its input's dtype, (self, input, ...), that accepts what will be cast."""

    def check(layer, value, *rest):
        if not switch.casts_off():
            value = cast(value, getattr(layer, weights)[0].dtype)
        return original(layer, value, *rest)

    return check


def _observed(entry: Entry, rule: Rule, original: Callable, switch: Switch, observe: Observer) -> Callable:
    """The same wrapper around a stand-in for the op that also hands back what it was called with."""

    def stand_in(*args, **kwargs):
        return original(*args, **kwargs), args, kwargs

    stand_in.__wrapped__ = original
    inner = build_wrapper(entry, rule, stand_in, switch)

    def wrapper(*args, **kwargs):
        if switch.casts_off():
            return original(*args, **kwargs)
        result, seen_args, seen_kwargs = inner(*args, **kwargs)
        observe((*args, *kwargs.values()), (*seen_args, *seen_kwargs.values()), result)
        return result

    return wrapper


_MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "<missing>"})()


def _by_name(
    original: Callable, switch: Switch, rule: Rule, layout: Layout, named: dict, rest: tuple, kwargs: dict
) -> Any:
    """A call whose leading arguments did not all come by position: they may bear torch's other names, like `x1`."""
    given = {name: value for name, value in named.items() if value is not _MISSING}
    args = []
    for name in [p.name for p in layout.lead or () if p.required]:
        if name not in given:
            break
        args.append(given.pop(name))
    kwargs = {**{name: value for name, value in given.items() if value is not None}, **kwargs}
    if switch.casts_off() or is_explicit((*args, *rest), kwargs):
        return original(*args, *rest, **kwargs)
    return _by_definition(original, rule, layout, (*args, *rest), kwargs)


def _by_definition(original: Callable, rule: Rule, layout: Layout, args: tuple, kwargs: dict) -> Any:
    if called_by_torch(args, kwargs, sys._getframe(2)):
        return original(*args, **kwargs)
    args, kwargs = cast_arguments(rule, layout, args, kwargs)
    return original(*args, **kwargs)


# The leading parameters {p}, the tests on them, and the call. `off` is empty while every thread casts.
_HEAD = """\
def make(_original, _switch, _by_name):
    def {function}({signature}, *args, **kwargs):
        if {missing}:
            return _by_name(_original, _switch, _rule, _layout, {named}, args, kwargs)
        if (_off and _switch.casts_off()) or _switch.retired or (kwargs and _is_stated(kwargs)){positional_dtype}:
            return _original({names}, *args, **kwargs)
"""
_TO_TARGET = """\
        if type({p}) in _plain:
            if {p}.dtype is not _target and {p}.dtype in _eligible:
                if {p}.layout is not _strided or {p}.is_nested:
                    return _by_definition(_original, _rule, _layout, ({names}, *args), kwargs)
                {p}_cast = _to_target({p})
            else:
                {p}_cast = {p}
        elif isinstance({p}, _Tensor):
            return _by_definition(_original, _rule, _layout, ({names}, *args), kwargs)
        else:
            {p}_cast = _cast({p}, _target) if {p} is not None else None
"""
_REST = """\
        if kwargs:
            kwargs = {{key: _cast(value, _target) for key, value in kwargs.items()}}
        return _original({cast_names}, *args, **kwargs)
    return {function}
"""
_SAME = "(type({p}) in _plain and ({p}.dtype is {first}.dtype or {p}.dtype not in _eligible))"
_UNIFY = """\
        if not ({same}):
            return _by_definition(_original, _rule, _layout, ({names}, *args), kwargs)
        return _original({names}, *args, **kwargs)
    return {function}
"""


@functools.cache
def _compile(layout: Layout, rule: Rule, function: str) -> Callable:
    """The factory of the specialised wrapper for one layout and rule."""
    lead = layout.lead or ()
    tensors = [p for p in lead if p.tensor]
    required = [p.name for p in lead if p.required]
    fields = {
        "function": function,
        "signature": ", ".join(f"{p.name}={'_missing' if p.required else 'None'}" for p in lead),
        "names": ", ".join(p.name for p in lead),
        "named": "dict(" + ", ".join(f"{p.name}={p.name}" for p in lead) + ")",
        "missing": " or ".join(f"{name} is _missing" for name in required) or "False",
        "positional_dtype": " or (args and _has_dtype(args))" if layout.dtype_positional else "",
    }
    source = _HEAD.format(**fields)
    if rule in TARGETS:
        casts = (_TO_TARGET.format(p=p.name, names=fields["names"]) for p in tensors)
        names = ", ".join(f"{p.name}_cast" if p.tensor else p.name for p in lead)
        source += "".join(casts) + _REST.format(function=function, cast_names=names)
    else:
        first = tensors[0].name
        tests = [f"type({first}) in _plain"]
        for p in tensors[1:]:
            same = _SAME.format(p=p.name, first=first)
            tests.append(same if p.required else f"({p.name} is None or {same})")
        source += _UNIFY.format(same=" and ".join(tests), **fields)
    namespace: dict[str, Any] = {
        "_missing": _MISSING,
        "_off": scope.off_somewhere,
        "_plain": _PLAIN,
        "_target": TARGETS.get(rule),
        "_rule": rule,
        "_layout": layout,
        "_to_target": METHODS.get(TARGETS.get(rule)),
        "_eligible": ELIGIBLE,
        "_strided": torch.strided,
        "_cast": cast,
        "_by_definition": _by_definition,
        "_Tensor": torch.Tensor,
        "_is_stated": is_stated,
        "_has_dtype": has_dtype,
    }
    exec(compile(source, f"<hmpx {function}: {rule}>", "exec"), namespace)
    return namespace["make"]


def build_wrapper(
    entry: Entry, rule: Rule, original: Callable, switch: Switch, observe: Observer | None = None
) -> Callable:
    """The wrapper of one entry point under one rule. It takes the place of `original` by name, for pickling too."""
    if entry.in_place:
        rule = Rule.FIRST_INPUT  # the first is written to: the others come to it, whichever list names the op
    layout = entry.layout
    if observe is not None:
        wrapper = _observed(entry, rule, original, switch, observe)
    elif layout.statistics:
        wrapper = _with_statistics(entry, rule, original, switch)
    elif layout.python or layout.lead is None or rule is Rule.UNCAST:
        wrapper = _general(entry, rule, original, switch)
    else:
        wrapper = _compile(layout, rule, entry.attribute)(original, switch, _by_name)
    module, _, qualified = entry.label.rpartition(".")
    if module == "Tensor":
        module, qualified = "torch", entry.label
    wrapper.__module__, wrapper.__qualname__ = module, qualified
    wrapper.__name__, wrapper.__doc__ = entry.attribute, original.__doc__
    wrapper.__hmpx_original__ = original
    return wrapper
