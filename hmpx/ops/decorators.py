"""Decorators that make a user's own function an op: its inputs are cast, it is the outermost, nothing inside is cast
again.

What is no plain function (methods of classes, builtins) is wrapped by wrapt, which binds it right; it costs more per
call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeVar

import wrapt

from hmpx import process_state, region_state
from hmpx.errors import HmpxError
from hmpx.ops.policies.policy import Rule
from hmpx.ops.policies.signatures import Signature
from hmpx.ops.wrapping.observing import Point, Seen, observed
from hmpx.ops.wrapping.rules import cast_arguments

_SIGNATURE = Signature(python=True)
Rules = Mapping[int, Rule | None]  # by scope
Function = TypeVar("Function", bound=Callable[..., Any])


def wrap(function: Any, rules: Rules, name: str, active: Callable[[], bool]) -> Any:
    """`function` with its inputs cast while `active()`, by the rule of the scope that it is called from.

    rules: by scope; it may get more.
    """
    some = next(filter(None, rules.values()))
    plain = inspect.unwrap(getattr(function, "__func__", function))
    if not callable(plain) or isinstance(plain, type):
        raise HmpxError(f"{name} is no function but {plain!r}; {some} is for functions and methods")
    if any(
        test(plain) for test in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    ):
        raise HmpxError(
            f"{name} is a generator or coroutine function, whose body runs after the call; list what it calls"
        )

    def call(wrapped, instance, args, kwargs):
        rule = some if len(rules) == 1 else rules.get(region_state.scope(), rules[0])
        observer = process_state.observer
        if observer is None or rule is None:
            return _called(wrapped, rule, active, *args, **kwargs)
        plain, run = (functools.partial(each, wrapped, rule, active) for each in (_called, _seen))
        return observed(Point(name, name, rule, wrapped), observer, plain, run, sys._getframe(1), args, kwargs)

    if not inspect.isfunction(function):
        return UserFunction(function, call)

    # A function around a function, because torch.compile takes a wrapt proxy for what it wraps, casts left out.
    @functools.wraps(function)
    def caller(*args, **kwargs):
        return call(function, None, args, kwargs)

    return caller


def _called(function: Callable, rule: Rule | None, active: Callable[[], bool], *args: Any, **kwargs: Any) -> Any:
    if rule is None or not active():
        return function(*args, **kwargs)
    return region_state.run_uncast(function, *cast_arguments(rule, _SIGNATURE, args, kwargs))


def _seen(function: Callable, rule: Rule, active: Callable[[], bool], *args: Any, **kwargs: Any) -> Seen:
    casting = active()
    if casting:
        args, kwargs = cast_arguments(rule, _SIGNATURE, args, kwargs)
    began = perf_counter()
    result = region_state.run_uncast(function, args, kwargs) if casting else function(*args, **kwargs)
    return Seen(args, kwargs, result, casting, began, perf_counter())


class UserFunction(wrapt.FunctionWrapper):
    """A wrapped function that copies and pickles as functions do: itself, by its name."""

    def __copy__(self):
        return self

    def __deepcopy__(self, memo: dict):
        return self

    def __reduce_ex__(self, protocol):
        return self.__wrapped__.__qualname__


def _decorator(function: Function, rule: Rule) -> Function:
    return wrap(function, {0: rule}, getattr(function, "__qualname__", repr(function)), region_state.casts_on)


def bf16(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as bfloat16.

    That holds whatever `low_precision` the conversion has. Lists, tuples and dicts of tensors are cast too; float64,
    integer, sparse and other tensors are not. Nothing inside the function is cast again. Without `convert()`, or inside
    `disable_casts()`, the call is the plain one.

    Raises:
        HmpxError: what is decorated is a class, or a generator or coroutine function.

    Example:
        >>> @hmpx.bf16
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs, inputs).dtype
        torch.bfloat16
    """
    return _decorator(function, Rule.BF16)


def fp16(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as float16. See `bf16`.

    Example:
        >>> @hmpx.fp16
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs, inputs).dtype
        torch.float16
    """
    return _decorator(function, Rule.FP16)


def fp32(function: Function) -> Function:
    """Decorate a function so that, under `convert()`, its floating tensor arguments come as float32. See `bf16`.

    Example:
        >>> @hmpx.fp32
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs.bfloat16(), inputs.bfloat16()).dtype
        torch.float32
    """
    return _decorator(function, Rule.FP32)


def promote(function: Function) -> Function:
    """Decorate a function so that its floating tensor arguments come in the widest dtype among them. See `bf16`.

    Example:
        >>> @hmpx.promote
        ... def product(x, y):
        ...     return x * y
        >>> with hmpx.convert():
        ...     product(inputs, inputs.bfloat16()).dtype
        torch.float32
    """
    return _decorator(function, Rule.PROMOTE)
