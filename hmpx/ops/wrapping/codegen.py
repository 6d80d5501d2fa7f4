"""The fast wrapper of an op whose signature is known: a plain Python function with the op's own leading parameters.

It is written out as source. Ordinary tensors get one look at their `type` and `dtype` each, and those to be cast one at
their signature; everything else (a subclass, a missing argument, a list, a sparse tensor) goes back to the definition,
`rules.cast_arguments`. What is usual is asked first, by identity: to find it in a set takes twice as long.

The wrapper of `torch.matmul` in the bf16 list, in full (`_run` computes the op, `_original` is what stood in its place
before, `_target` is torch.bfloat16, `_castable` what a rule casts, `_usual` torch.float32; `_off.any` says
that casts are off in some thread or task, `_traced.inside` that Dynamo traces a region). No argument of torch has a
name that begins with an underscore, and all names of the wrapper do:

    def make(_original, _run, _switch):
        _off, _casts_off, _widened = _switch.off, _switch.casts_off, _widening(_original, _signature)

        def matmul(input=_missing, other=_missing, *_args, **_kwargs):
            _input_type = type(input)
            _other_type = type(other)
            if (_input_type is _Tensor or _input_type is _Param) and (_other_type is _Tensor or _other_type is _Param):
                _input_dtype = input.dtype
                _other_dtype = other.dtype
                if _input_dtype is _target and _other_dtype is _target and not (_traced.inside or _off.any or _kwargs):
                    return _run(input, other, *_args) if _args else _run(input, other)
                _left = (_traced.inside or _off.any) and _casts_off(_signature, (input, other,), _kwargs, _rule)
                if _left or (_kwargs and _is_stated(_kwargs)):
                    return (_widened if _left == "widen" else _original)(input, other, *_args, **_kwargs)
                _input_cast = input
                if _input_dtype is _usual or _input_dtype in _castable:
                    if input.layout is not _strided:
                        return _unusual(_original, _run, _switch, _rule, _signature, (input, other,), _args, _kwargs)
                    if _caches and _input_type is _Param:
                        _input_cast = _cast_weight(input, _target, _to_target)
                    else:
                        _input_cast = _to_target(input)
                _other_cast = other
                if _other_dtype is _usual or _other_dtype in _castable:
                    if other.layout is not _strided:
                        return _unusual(_original, _run, _switch, _rule, _signature, (input, other,), _args, _kwargs)
                    if _caches and _other_type is _Param:
                        _other_cast = _cast_weight(other, _target, _to_target)
                    else:
                        _other_cast = _to_target(other)
                if _args or _kwargs:
                    _kwargs = {key: _cast(value, _target) for key, value in _kwargs.items()}
                    return _run(_input_cast, _other_cast, *_args, **_kwargs)
                return _run(_input_cast, _other_cast)
            return _unusual(_original, _run, _switch, _rule, _signature, (input, other,), _args, _kwargs)
        return matmul

`_casts_off` says "widen" of an op that torch would refuse inside ``torch.autocast(enabled=False)``.

Where casts belong to the model, the wrapper asks whether the innermost region casts, as that of a forward does:
``_traced.inside or _switch.retired or not _nowhere.here.casting``.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base import region_state
from hmpx.base.raw import GENERATED
from hmpx.base.torch_private import in_torch_func
from hmpx.ops.policies.policy import LOW_RULES, Rule
from hmpx.ops.policies.signatures import Argument, Signature
from hmpx.ops.wrapping.callers import WRITTEN, register
from hmpx.ops.wrapping.overriding import call, called_by_torch
from hmpx.ops.wrapping.rules import (
    ELIGIBLE,
    METHODS,
    TARGETS,
    call_cast,
    cast,
    has_dtype,
    is_explicit,
    is_stated,
    is_taken_apart,
)
from hmpx.ops.wrapping.switch import WIDEN, Switch
from hmpx.ops.wrapping.weight_cache import cast_weight, open_caches

_written = itertools.count(1)  # each source has a file name of its own


class _Missing:
    """The default of a required argument, for one that was not given; it has no dtype."""

    dtype = None

    def __repr__(self) -> str:
        return "<missing>"


_MISSING: Any = _Missing()


def _unusual(
    original: Callable,
    run: Callable,
    switch: Switch,
    rule: Rule,
    signature: Signature,
    values: tuple,
    args: tuple,
    kwargs: dict,
) -> Any:
    """Make a call of any form, slowly. Leading arguments may be given by torch's other names for them, like `x1`."""
    parameters = (*(signature.lead or ()), *signature.tail)
    first_missing = next((i for i, value in enumerate(values) if value is _MISSING), len(values))
    given = list(values[:first_missing])
    rest = zip(parameters[first_missing:], values[first_missing:], strict=True)
    named = {p.name: value for p, value in rest if value is not _MISSING and value is not p.default}
    while not args and len(given) > len(signature.lead or ()) and given[-1] is parameters[len(given) - 1].default:
        given.pop()  # of the tail, and the caller has not written it
    args, kwargs = (*given, *args), {**named, **kwargs}
    left = switch.casts_off(signature, args, kwargs, rule)
    if left or is_explicit(args, kwargs) or called_by_torch(args, kwargs, 2):
        return widening(original, signature)(*args, **kwargs) if left == WIDEN else call(original, args, kwargs)
    return call_cast(run, rule, signature, args, kwargs)


def widening(original: Callable, signature: Signature) -> Callable:
    """Return `original` taking tensors of different dtypes in the widest of them."""

    def widened(*args, **kwargs):
        if is_explicit(args, kwargs):
            return call(original, args, kwargs)
        return call_cast(original, Rule.PROMOTE, signature, args, kwargs)

    return widened


# {right} and {same} look at the dtypes of the parameters that may be tensors, {plain} at their types.
_HEAD = """\
def make(_original, _run, _switch):
    _off, _casts_off, _widened = _switch.off, _switch.casts_off, _widening(_original, _signature)

    def {function}({signature}, *_args, **_kwargs):
"""
_TYPE = """\
        _{p}_type = type({p})
"""
_ARE_PLAIN = """\
        if {plain}{present}:
"""
_DTYPE = """\
            _{p}_dtype = {p}.dtype
"""
_DTYPE_OR_NONE = """\
            _{p}_dtype = {absent} if {p} is None else {p}.dtype
"""
_RIGHT = """\
            if {right} and not ({off} or _kwargs{dtypes}):
                return _run({names}, *_args) if _args else _run({names})
"""
_LOOK = """\
            _left = ({off}) and _casts_off(_signature, ({names},), _kwargs, _rule)
            if _left or (_kwargs and _is_stated(_kwargs){dtypes}):
                return (_widened if _left == "widen" else _original)({names}, *_args, **_kwargs)
"""
_LEAVE = """\
            if {same}:
                return _run({names}, *_args, **_kwargs)
"""
_CAST = """\
            _{p}_cast = {p}
            if _{p}_dtype is _usual or _{p}_dtype in _castable:
{apart}                if {p}.layout is not _strided:
                    return _unusual(_original, _run, _switch, _rule, _signature, ({names},), _args, _kwargs)
                if _caches and _{p}_type is _Param:
                    _{p}_cast = _cast_weight({p}, _target, _to_target)
                else:
                    _{p}_cast = _to_target({p})
"""
_APART = """\
                if not _compiling() and _layer() is not None and _is_taken_apart(_rule, _signature, ({names},)):
                    return _unusual(_original, _run, _switch, _rule, _signature, ({names},), _args, _kwargs)
"""
_CAST_CALL = """\
            if _args or _kwargs:
                _kwargs = {{key: _cast(value, _target) for key, value in _kwargs.items()}}
                return _run({casts}, *_args, **_kwargs)
            return _run({casts})
"""
_TAIL = """\
        return _unusual(_original, _run, _switch, _rule, _signature, ({names},), _args, _kwargs)
    return {function}
"""


def _is_plain(p: Argument) -> str:
    kind, absent = f"_{p.name}_type", f" or {p.name} is None" if p.optional else ""
    return f"({kind} is _Tensor or {kind} is _Param{absent})"


def _default(p: Argument) -> str:
    return "_missing" if p.required else "None" if p.default is None else f"_default_of_{p.name}"


_OFF = {  # by `everywhere`
    True: "_traced.inside or _off.any",
    False: "_traced.inside or _switch.retired or not _nowhere.here.casting",
}


@functools.cache
def make_wrapper(
    signature: Signature, rule: Rule, function: str, everywhere: bool
) -> Callable[[Callable, Callable, Switch], Callable]:
    """Return a factory of wrappers for one signature and rule; it takes the op, its runner and a switch.

    everywhere: whether every op is cast, and not the model's alone.
    """
    parameters = (*(signature.lead or ()), *signature.tail)
    tensors = [p for p in parameters if p.tensor]
    fields = {
        "function": function,
        "signature": ", ".join(f"{p.name}={_default(p)}" for p in parameters),
        "names": ", ".join(p.name for p in parameters),
        "present": "".join(f" and {p.name} is not _missing" for p in parameters if p.required and not p.tensor),
        "plain": " and ".join(map(_is_plain, tensors)),
        "off": _OFF[everywhere],
        "dtypes": " or _args and _dtyped(_args)" if signature.dtype_positional else "",
        "casts": ", ".join(f"_{p.name}_cast" if p.tensor else p.name for p in parameters),
    }
    target, first = TARGETS.get(rule), f"_{tensors[0].name}_dtype"
    wanted = first if target is None else "_target"
    kept = {parameters[i] for i in (*signature.statistics, *signature.same_dtype)}
    # FP32 statistics, and the tensors beside them, are right for every input; so is an absent one.
    right_dtypes = {p: "_float32" if p in kept else wanted for p in tensors}
    right = [f"_{p.name}_dtype is {dtype}" for p, dtype in right_dtypes.items() if dtype != f"_{p.name}_dtype"]
    if target is None and kept:
        right.insert(0, f"{first} in _eligible")
    if signature.same_dtype:  # a bias without a weight gets one
        weight, bias = (parameters[i].name for i in signature.same_dtype)
        right.append(f"({bias} is None or {weight} is not None)")
    fields["right"] = " and ".join(right) or "True"
    body = ""
    for p, dtype in right_dtypes.items():
        absent = "None" if dtype == f"_{p.name}_dtype" else dtype
        body += (_DTYPE_OR_NONE if p.optional else _DTYPE).format(p=p.name, absent=absent)
    body += _RIGHT.format(**fields)
    if not kept:
        body += _LOOK.format(**fields)
        if target is None:
            same = [f"(_{p.name}_dtype is {first} or _{p.name}_dtype not in _eligible)" for p in tensors[1:]]
            body += _LEAVE.format(same=" and ".join(same) or "True", **fields)
        else:
            for p in tensors:
                apart = p.name == signature.adds and rule in LOW_RULES.values()
                body += _CAST.format(p=p.name, apart=_APART.format(**fields) if apart else "", **fields)
            body += _CAST_CALL.format(**fields)
    head = _HEAD + "".join(_TYPE.format(p=p.name) for p in tensors) + _ARE_PLAIN
    source = head.format(**fields) + body + _TAIL.format(**fields)
    namespace: dict[str, Any] = {
        GENERATED: True,
        "_missing": _MISSING,
        "_Tensor": torch.Tensor,
        "_float32": torch.float32,
        "_target": target,
        "_to_target": None if target is None else METHODS[target],
        "_rule": rule,
        "_signature": signature,
        "_eligible": ELIGIBLE,
        "_castable": ELIGIBLE - {target},
        "_usual": torch.bfloat16 if target is torch.float32 else torch.float32,
        "_strided": torch.strided,
        "_caches": open_caches,
        "_cast": cast,
        "_cast_weight": cast_weight,
        "_Param": torch.nn.Parameter,
        "_unusual": _unusual,
        "_widening": widening,
        "_is_taken_apart": is_taken_apart,
        "_compiling": is_dynamo_compiling,
        "_layer": in_torch_func,
        "_nowhere": region_state.nowhere,
        "_traced": region_state.traced,
        "_is_stated": is_stated,
        "_dtyped": has_dtype,
    }
    namespace |= {_default(p): p.default for p in signature.tail}
    file = f"{WRITTEN} {function}: {rule}, {next(_written)}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file  # for tracebacks, and for `inspect`
    exec(compile(source, file, "exec"), namespace)
    make = namespace["make"]
    register(next(constant for constant in make.__code__.co_consts if isinstance(constant, types.CodeType)), rule)
    return make
