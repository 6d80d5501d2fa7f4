"""One wrapper built for each (entry point, rule): look at the arguments, cast what the rule says, call torch.

Plain functions beat wrapt proxies and `TorchFunctionMode` in Python's interpreter, and the unlisted op costs nothing.
Where the signature is known, `codegen` writes one that does not even walk `*args`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Mapping

import torch

from hmpx import region_state
from hmpx.dtype_names import dtype_name
from hmpx.errors import HmpxError
from hmpx.ops.policies.catalog import Entry
from hmpx.ops.policies.policy import Case, Rule
from hmpx.ops.wrapping import refusals
from hmpx.ops.wrapping.callers import calling, pass_over, register
from hmpx.ops.wrapping.codegen import Switch, make_wrapper
from hmpx.ops.wrapping.observing import Observer, Point, observed, stand_in
from hmpx.ops.wrapping.overriding import PLAIN, call, called_by_torch, public
from hmpx.ops.wrapping.rules import call_cast, cast, is_explicit
from hmpx.region_state import scope

logger = logging.getLogger("hmpx")


def _general(entry: Entry, rule: Rule, original: Callable, run: Callable, switch: Switch) -> Callable:
    """A wrapper for any signature, also for Python functions of torch, inside which nothing is cast again."""
    signature = entry.signature
    stated = _stated_positions(original) if signature.python else ()
    inner = _deciding(run) if signature.python else run

    def wrapper(*args, **kwargs):
        if switch.casts_off() or called_by_torch(args, kwargs, 1):
            return call(original, args, kwargs)
        if is_explicit(args, kwargs) or kwargs.get("inplace") or _is_stated_at(stated, args):
            return call(inner, args, kwargs)
        return call_cast(inner, rule, signature, args, kwargs)

    wrapper.__code__ = _code_under(rule, wrapper.__code__)
    return wrapper


@functools.cache
def _code_under(rule: Rule, code: types.CodeType) -> types.CodeType:
    """A copy of the function with a code object of its own for one rule, so that the running code tells the rule."""
    own = code.replace(co_name=f"{code.co_name}_{rule.name.lower()}")
    register(own, rule)
    return own


def _deciding(function: Callable) -> Callable:
    """A listed `function`, with casts off inside."""

    def inner(*args, **kwargs):
        return region_state.run_uncast(call, (function, args, kwargs), {})

    vars(inner)["hands_on"] = function
    return inner


def _stated_positions(function: Callable) -> tuple[int, ...]:
    """Positions of `out`, `dtype` and `inplace` in a Python function of torch, by which the caller decides."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    return tuple(names.index(name) for name in ("out", "dtype", "inplace") if name in names)


def _is_stated_at(positions: tuple[int, ...], args: tuple) -> bool:
    return any(i < len(args) and args[i] is not None and args[i] is not False for i in positions)


def build_uncast(entry: Entry, original: Callable, switch: Switch) -> Callable:
    """A wrapper of a Python function of torch that is no part of a model: casts are off inside."""
    public(original)
    inner = _deciding(original)

    def uncast(*args, **kwargs):
        if switch.casts_off() or called_by_torch(args, kwargs, 1):
            return call(original, args, kwargs)
        return call(inner, args, kwargs)

    vars(uncast)["__wrapped__"] = original  # its signature, which torch_xla compares before it puts its own on top
    return _named(uncast, entry, original)


def build_check(weights: str, switch: Switch, original: Callable) -> Callable:
    """A layer's check of its input's dtype, changed to accept inputs that will be cast."""

    def check(layer, value, *rest):
        if not switch.casts_off():
            value = cast(value, getattr(layer, weights)[0].dtype)
        return original(layer, value, *rest)

    return check


def _observed(
    entry: Entry, point: Point, original: Callable, run: Callable | None, switch: Switch, observer: Observer
) -> Callable:
    """The wrapper of an entry point while an observer is active."""
    public(original)

    if point.rule is None:
        plain, inner = original, stand_in(original, casting=False)
    else:
        rule, run = _computing(entry, point.rule, original, run)
        plain = _built(entry, rule, run, original, switch)
        inner = _built(entry, rule, stand_in(run, casting=True), stand_in(original, casting=False), switch)

    def wrapper(*args, **kwargs):
        caller = calling(sys._getframe(1))
        if observer.leaves(caller.f_code) or called_by_torch(args, kwargs, 1):
            return plain(*args, **kwargs)
        return observed(point, observer, plain, inner, caller, args, kwargs)

    return wrapper


def build_carrying(position: int, switch: Switch, original: Callable) -> Callable:
    """A wrapper of a torch function that stores a callback: the callback runs in the region of now."""

    def carrier(*args, **kwargs):
        if len(args) > position and not switch.retired:
            args = (*args[:position], region_state.carrying(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return carrier


def build_wrapper(
    entry: Entry, rule: Rule, original: Callable, switch: Switch, run: Callable | None = None
) -> Callable:
    """The wrapper of one entry point under one rule. It takes the place of `original` by name, for pickling too.

    run: what computes the op once the arguments are as the rule says; None for `original` itself.
    """
    return _named(_built(entry, *_computing(entry, rule, original, run), original, switch), entry, original)


def _computing(entry: Entry, rule: Rule, original: Callable, run: Callable | None) -> tuple[Rule, Callable]:
    """The rule of an entry point, and the function that computes the op."""
    if entry.in_place:  # the first is written to: the others come to it, whichever list names the op
        return Rule.FIRST_INPUT, original
    return rule, original if run is None or rule is Rule.FP32 else run


def _built(entry: Entry, rule: Rule, run: Callable, original: Callable, switch: Switch) -> Callable:
    public(original)  # looks it up once, while torch is as it was made
    if entry.signature.python or entry.signature.lead is None:
        return _general(entry, rule, original, run, switch)
    return make_wrapper(entry.signature, rule, entry.attribute)(original, run, switch)


def build_choice(
    op: str,
    entry: Entry,
    cases: tuple[Case, ...],
    original: Callable,
    switch: Switch,
    running: Callable[[Case], Callable] | None = None,
    observer: Observer | None = None,
) -> Callable:
    """The wrapper of one entry point whose rule depends on the arguments.

    running: what computes the op in a case once the arguments are as its rule says; None for `original` itself.
    """

    def build(case: Case) -> Callable:
        run = None if running is None else running(case)
        if observer is not None:
            point = Point(op, entry.label, case.rule, original, case.follows, entry.in_place)
            return _named(_observed(entry, point, original, run, switch, observer), entry, original)
        return original if case.rule is None else build_wrapper(entry, case.rule, original, switch, run)

    if len(cases) == 1:
        return build(cases[0])
    runs = {case.rule: build(case) for case in reversed(cases)}
    choices = tuple((case.when, runs[case.rule]) for case in cases if case.when is not None)
    otherwise = next(runs[case.rule] for case in cases if case.when is None)

    def choice(*args, **kwargs):
        # Dynamo, to which every tensor is a plain one, has no frames.
        plain = all(type(a) in PLAIN for a in args if isinstance(a, torch.Tensor))
        if (observer is None and switch.casts_off()) or (not plain and called_by_torch(args, kwargs, 1)):
            return call(original, args, kwargs)
        for when, run in choices:
            if _accepts(when, args, kwargs):
                return run(*args, **kwargs)
        return otherwise(*args, **kwargs)

    return _named(choice, entry, original)


def build_explaining(op: str, entry: Entry, original: Callable, run: Callable) -> Callable:
    """The wrapper `run` of an op that may have no BF16 kernel: its error names the cure."""

    def explaining(*args, **kwargs):
        try:
            return run(*args, **kwargs)
        except (RuntimeError, TypeError) as error:
            refusals.explain(error, op, (*args, *kwargs.values()))
            raise

    pass_over(explaining.__code__)
    return _named(explaining, entry, original)


def build_refusing(
    op: str, entry: Entry, original: Callable, run: Callable, switch: Switch, instead: str, asked: bool
) -> Callable:
    """The wrapper `run` of an op that is unsafe on rounded input: a first input in low precision is an error.

    instead: what is safe. asked: a list of the user's own names the op, so that this is a warning, once.
    """
    warned = False

    def refusing(*args, **kwargs):
        nonlocal warned
        value = args[0] if args else kwargs.get("input")
        if isinstance(value, torch.Tensor) and value.dtype in refusals.LOW and not (switch.casts_off() or warned):
            dtype = dtype_name(value.dtype)
            message = (
                f"{op} of {dtype} probabilities: .999 is 1 in {dtype}, so that a confident wrong answer has loss 100 "
                f"and gradient 0; use {instead} on the logits"
            )
            if not asked:
                raise HmpxError(f"{message}, or compute the sigmoid in float32")
            logger.warning("hmpx: %s", message)
            warned = True
        return run(*args, **kwargs)

    pass_over(refusing.__code__)
    return _named(refusing, entry, original)


def build_untouched(original: Callable) -> Callable:
    """A wrapper that calls the original as torch would without hmpx."""

    def untouched(*args, **kwargs):
        return call(original, args, kwargs)

    return untouched


def build_scoped(entry: Entry, original: Callable, runs: Mapping[int, Callable]) -> Callable:
    """The wrapper of one entry point whose rule depends on the scope: it asks for the scope in each call.

    runs: what is called in each scope; it may get more.
    """
    elsewhere = runs[0]

    def scoped(*args, **kwargs):
        return runs.get(scope(), elsewhere)(*args, **kwargs)

    pass_over(scoped.__code__)
    return _named(scoped, entry, original)


def _accepts(when: Callable[..., bool], args: tuple, kwargs: dict) -> bool:
    try:
        return when(*args, **{name: value for name, value in kwargs.items() if name not in ("out", "dtype")})
    except (TypeError, ValueError, AttributeError):  # no legal call: torch says it better
        return False


def _named(wrapper: Callable, entry: Entry, original: Callable) -> Callable:
    """`wrapper` under the name of the function whose place it takes."""
    module, _, qualified = entry.label.rpartition(".")
    if module == "Tensor":
        module, qualified = "torch", entry.label
    wrapper.__module__, wrapper.__qualname__ = module, qualified
    wrapper.__name__, wrapper.__doc__ = entry.attribute, original.__doc__
    vars(wrapper)["__hmpx_original__"] = original
    return wrapper
