"""One wrapper built for each (entry point, rule): look at the arguments, cast what the rule says, call torch.

There are two ways to the same casts. `cast_arguments` is the definition: any layout, any mixture of positional and
keyword arguments. `_compile` writes, for an op whose layout is known, a plain Python function with the op's own leading
parameters that does the same with one `type` and one `dtype` look at each; everything unusual (a subclass, a missing
argument, a list) goes back to the definition. Plain functions beat `*args` walks, wrapt proxies and
`TorchFunctionMode` in Python's interpreter, and the unlisted op costs nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hmpx import scope
from hmpx.catalog import Entry, Layout
from hmpx.policy import Rule

Tensor = torch.Tensor
BF16, FP32 = torch.bfloat16, torch.float32
ELIGIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16})
# torch's own methods, taken before anything is patched. `x.bfloat16()` is cheaper than `x.to(torch.bfloat16)`.
_METHODS = {torch.bfloat16: Tensor.bfloat16, torch.float32: Tensor.float, torch.float16: Tensor.half}
_TARGETS = {Rule.BF16: torch.bfloat16, Rule.FP32: torch.float32}

Observer = Callable[[tuple, tuple, Any], None]  # (arguments given, arguments the op saw, result)


class Switch:
    """Whether the wrappers of one conversion are alive. A wrapper that outlives its conversion is inert."""

    __slots__ = ("retired",)

    def __init__(self) -> None:
        self.retired = False

    def casts_off(self) -> bool:
        return self.retired or bool(scope.off_somewhere and scope.casts_off())


def is_eligible(value: Any) -> bool:
    """Whether `value` is a dense floating tensor of FP32, BF16 or FP16."""
    return (
        isinstance(value, Tensor) and value.dtype in ELIGIBLE and value.layout is torch.strided and not value.is_nested
    )


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` in `dtype` where it is eligible, in lists, tuples and dicts too; itself where nothing changes."""
    if isinstance(value, Tensor):
        return _METHODS[dtype](value) if value.dtype is not dtype and is_eligible(value) else value
    kind = type(value)
    if kind is list or kind is tuple:
        items = [cast(item, dtype) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else kind(items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(cast(item, dtype) for item in value))
    if kind is dict:
        items = {key: cast(item, dtype) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    return value


def eligible_dtypes(values: Iterable[Any]) -> list[torch.dtype]:
    """The dtypes of the eligible tensors in `values`, in order, in lists, tuples and dicts too."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            if is_eligible(value):
                found.append(value.dtype)
        elif isinstance(value, list | tuple):
            found += eligible_dtypes(value)
        elif type(value) is dict:
            found += eligible_dtypes(value.values())
    return found


def is_explicit(args: tuple, kwargs: dict) -> bool:
    """Whether the caller said himself what comes out: ``out=`` or ``dtype=``."""
    return _is_stated(kwargs) or _has_dtype(args)


def _is_stated(kwargs: dict) -> bool:
    get = kwargs.get
    return get("dtype") is not None or get("out") is not None or get("out_dtype") is not None


def _has_dtype(args: tuple) -> bool:
    for value in args:  # a loop, not any(): this runs in every call of softmax
        if type(value) is torch.dtype:
            return True
    return False


def target_dtype(rule: Rule, args: tuple, kwargs: dict) -> torch.dtype | None:
    """The dtype that `rule` brings the arguments to; None where it has nothing to say."""
    if rule in _TARGETS:
        return _TARGETS[rule]
    dtypes = eligible_dtypes((*args, *kwargs.values()))
    if not dtypes:
        return None
    return dtypes[0] if rule is Rule.FIRST_INPUT else functools.reduce(torch.promote_types, dtypes)


def cast_arguments(rule: Rule, layout: Layout, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as the op is to see them. Tensors that it may write to (``layout.statistics``) stay themselves."""
    dtype = target_dtype(rule, args, kwargs)
    if dtype is None:
        return args, kwargs
    if not layout.statistics:
        return tuple(cast(value, dtype) for value in args), {key: cast(value, dtype) for key, value in kwargs.items()}
    names = [p.name for p in layout.lead or ()]
    written = {*layout.statistics, *(names[i] for i in layout.statistics)}
    follow = {*layout.beside, *(names[i] for i in layout.beside)}
    places = {**dict(enumerate(args)), **kwargs}
    beside = next((places[key].dtype for key in places if key in written and is_eligible(places[key])), dtype)

    def fit(key: Any, value: Any) -> Any:
        return value if key in written else cast(value, beside if key in follow else dtype)

    return tuple(fit(i, value) for i, value in enumerate(args)), {key: fit(key, value) for key, value in kwargs.items()}


def _stage(layout: Layout, args: tuple) -> tuple[tuple, list[tuple[Tensor, Tensor]]]:
    """Widen statistics that are narrower than the input, which torch refuses; the pairs say what to write back."""
    staged = []
    values = list(args)
    if is_eligible(values[0]) and values[0].dtype is FP32:
        for i in (*layout.statistics, *layout.beside):
            if i < len(values) and is_eligible(values[i]) and values[i].dtype is not FP32:
                wide = cast(values[i], FP32)
                if i in layout.statistics:
                    staged.append((values[i], wide))
                values[i] = wide
    return tuple(values), staged


def _with_statistics(entry: Entry, rule: Rule, original: Callable, switch: Switch) -> Callable:
    """Ops that update running statistics: the caller's own buffers are what gets updated."""
    layout = entry.layout

    def wrapper(*args, **kwargs):
        if switch.casts_off():
            return original(*args, **kwargs)
        args, kwargs = cast_arguments(rule, layout, args, kwargs)
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
    in_place_at = _in_place_parameter(original) if layout.python else None

    def wrapper(*args, **kwargs):
        if switch.casts_off():
            return original(*args, **kwargs)
        if rule is not Rule.UNCAST and not is_explicit(args, kwargs) and not _asks_in_place(in_place_at, args, kwargs):
            args, kwargs = cast_arguments(rule, layout, args, kwargs)
        if layout.python:
            return scope.run_uncast(original, args, kwargs)
        return original(*args, **kwargs)

    return wrapper


def _in_place_parameter(function: Callable) -> int | None:
    """The position of a parameter called `inplace`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    return names.index("inplace") if "inplace" in names else None


def _asks_in_place(position: int | None, args: tuple, kwargs: dict) -> bool:
    return position is not None and bool(kwargs.get("inplace", args[position] if position < len(args) else False))


def _observed(entry: Entry, rule: Rule, original: Callable, switch: Switch, observe: Observer) -> Callable:
    """The same wrapper around a stand-in for the op that also hands back what it was called with."""

    def stand_in(*args, **kwargs):
        return original(*args, **kwargs), args, kwargs

    stand_in.__wrapped__ = original
    inner = build(entry, rule, stand_in, switch)

    def wrapper(*args, **kwargs):
        if switch.casts_off():
            return original(*args, **kwargs)
        result, seen_args, seen_kwargs = inner(*args, **kwargs)
        observe((*args, *kwargs.values()), (*seen_args, *seen_kwargs.values()), result)
        return result

    return wrapper


_MISSING: Any = type("_Missing", (), {"__repr__": lambda self: "<missing>"})()


def _by_name(original: Callable, rule: Rule, layout: Layout, named: dict, rest: tuple, kwargs: dict) -> Any:
    """A call whose leading arguments did not all come by position: they may bear torch's other names, like `x1`."""
    given = {name: value for name, value in named.items() if value is not _MISSING}
    required = [p.name for p in layout.lead or () if p.required]
    args = []
    for name in required:
        if name not in given:
            break
        args.append(given.pop(name))
    kwargs = {**{name: value for name, value in given.items() if value is not None}, **kwargs}
    if not is_explicit((*args, *rest), kwargs):
        args, kwargs = cast_arguments(rule, layout, (*args, *rest), kwargs)
    return original(*args, **kwargs)


# The leading parameters {p}, the tests on them, and the call. `off` is empty while every thread casts.
_HEAD = """\
def make(_original, _switch, _by_name):
    def {function}({signature}, *args, **kwargs):
        if {missing}:
            return _by_name(_original, _rule, _layout, {named}, args, kwargs)
        if (_off and _switch.casts_off()) or _switch.retired or (kwargs and _is_stated(kwargs)){positional_dtype}:
            return _original({names}, *args, **kwargs)
"""
_TO_TARGET = """\
        if type({p}) in _plain:
            if {p}.dtype is not _target and {p}.dtype in _eligible and {p}.layout is _strided and not {p}.is_nested:
                {p} = _to_target({p})
        elif {p} is not None:
            {p} = _cast({p}, _target)
"""
_REST = """\
        if kwargs:
            kwargs = {{key: _cast(value, _target) for key, value in kwargs.items()}}
"""
_SAME = "(type({p}) in _plain and ({p}.dtype is {first}.dtype or {p}.dtype not in _eligible))"
_UNIFY = """\
        if not ({same}):
            {names}, = _unify(({names},))
"""
_TAIL = """\
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
    if rule in _TARGETS:
        source += "".join(_TO_TARGET.format(p=p.name) for p in tensors) + _REST.format()
    else:
        first = tensors[0].name
        tests = [f"type({first}) in _plain"]
        for p in tensors[1:]:
            same = _SAME.format(p=p.name, first=first)
            tests.append(same if p.required else f"({p.name} is None or {same})")
        source += _UNIFY.format(same=" and ".join(tests), names=fields["names"])
    source += _TAIL.format(**fields)
    namespace: dict[str, Any] = {
        "_missing": _MISSING,
        "_off": scope.off_somewhere,
        "_plain": frozenset({Tensor, torch.nn.Parameter}),
        "_target": _TARGETS.get(rule),
        "_rule": rule,
        "_layout": layout,
        "_to_target": _METHODS.get(_TARGETS.get(rule)),
        "_eligible": ELIGIBLE,
        "_strided": torch.strided,
        "_cast": cast,
        "_is_stated": _is_stated,
        "_has_dtype": _has_dtype,
        "_unify": lambda args: cast_arguments(rule, layout, args, {})[0],
    }
    exec(compile(source, f"<hmpx {function}: {rule}>", "exec"), namespace)
    return namespace["make"]


def build(entry: Entry, rule: Rule, original: Callable, switch: Switch, observe: Observer | None = None) -> Callable:
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
