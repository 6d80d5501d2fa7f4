"""Lets observers see the calls of ops at the wrappers.

An observer stands around the outermost op: what an observed op calls in turn is a part of it, and not observed again.
It decides whether the op runs, and what is handed back to the program. Where nobody observes, nothing of this is in any
wrapper.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from torch.compiler import is_dynamo_compiling

from hmpx.base import run_in_region
from hmpx.ops.policies.policy import Rule
from hmpx.ops.wrapping.overriding import call, stand_in


@dataclass(frozen=True, eq=False)
class Point:
    """One entry point of an op under one rule; of a user's own function, the function.

    op: its name in a list. label: how it is called. rule: that casts its arguments, None for none. follows:
    the listed ops that the rule comes from, where it is not the op's own. original: torch's function. in_place: it
    writes to its first argument.
    """

    op: str
    label: str
    rule: Rule | None
    original: Callable
    follows: tuple[str, ...] = ()
    in_place: bool = False


class Seen(NamedTuple):
    """One call of an op: its arguments after the casts, and its result.

    casting: whether a rule has looked at the arguments: casts are on, and the caller does not say by ``dtype=`` what
    comes out. began, ended: of the op itself, without the casts; seconds of `time.perf_counter`.
    """

    args: tuple
    kwargs: dict
    result: Any
    casting: bool
    began: float
    ended: float


Run = Callable[..., Seen]


class Observer(Protocol):
    """Looks at calls of ops.

    everything: whether it wants ops that no rule concerns, and casts by hand (``x.bfloat16()``), too.
    """

    everything: bool

    def leaves(self, caller: types.CodeType) -> bool:
        """Return whether the observer skips the calls inside a function, such as a step of an optimizer."""
        ...

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        """Observe one call made in `frame`. It usually returns ``run(*args, **kwargs)``."""
        ...


class Several:
    """Observers around one another, the first outermost."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self.everything = any(observer.everything for observer in observers)

    def leaves(self, caller: types.CodeType) -> bool:
        return all([observer.leaves(caller) for observer in self._observers])

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        for observer in reversed(self._observers):
            run = functools.partial(_around, observer, point, run, frame)
        return run(*args, **kwargs)


def _around(observer: Observer, point: Point, run: Run, frame: types.FrameType, /, *args: Any, **kwargs: Any) -> Seen:
    return observer(point, run, frame, args, kwargs)


class _Observing(threading.local):
    inside = False  # of a call that is observed


_thread = _Observing()


def observed(
    point: Point, observer: Observer, plain: Callable, run: Run, caller: types.FrameType, args: tuple, kwargs: dict
) -> Any:
    """Give one call to the observer; a call inside an observed call goes to `plain`."""
    if _thread.inside or is_dynamo_compiling():
        return plain(*args, **kwargs)
    _thread.inside = True
    try:
        return observer(point, run, caller, args, kwargs).result
    finally:
        _thread.inside = False


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Open a region without observation and without casts, for an observer's own computations."""
    before, _thread.inside = _thread.inside, True
    try:
        with run_in_region.region(False):
            yield
    finally:
        _thread.inside = before


def reporting(function: Callable, casting: bool) -> Run:
    """Return a stand-in for `function`, which computes an op: it reports arguments and result.

    casting: whether it is called with arguments that a rule has looked at.
    """

    @stand_in(function, computes=False)
    def report(*args: Any, **kwargs: Any) -> Seen:
        began = perf_counter()
        result = call(function, args, kwargs)
        return Seen(args, kwargs, result, casting, began, perf_counter())

    vars(report).update(reporting=functools.partial(reporting, casting=False), __wrapped__=function)
    return report
