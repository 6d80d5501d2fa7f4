"""Says what a conversion does: to observers, which see the calls of ops at the wrappers, and to the logger "hmpx".

An observer stands around the outermost op: what an observed op calls in turn is a part of it, and not observed again.
It decides whether the op runs, and what is handed back to the program. Where nobody observes, nothing of this is in any
wrapper.

`isVerbose=True` logs each distinct decision once, and how often it was taken at the end. At the first step of an
optimizer, a conversion warns once of FP16 without a `GradScaler`, which loses gradients below 6e-8, and of BF16 on a
GPU that has no instructions for it (T4, V100), where torch computes it slowly.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, run_in_region
from hmpx.base.changes import Changes, Flag
from hmpx.base.process_state import first_steps
from hmpx.base.tensors import dtype_name
from hmpx.ops.policies.policy import LOW_RULES, Policy, Rule
from hmpx.ops.wrapping.callers import users_line
from hmpx.ops.wrapping.overriding import call, stand_in
from hmpx.ops.wrapping.switch import is_outside


@dataclass(frozen=True, eq=False)
class EntryPoint:
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

    def __call__(self, point: EntryPoint, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        """Observe one call made in `frame`. It usually returns ``run(*args, **kwargs)``."""
        ...


class ObserverGroup:
    """Observers around one another, the first outermost."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)
        self.everything = any(observer.everything for observer in observers)

    def leaves(self, caller: types.CodeType) -> bool:
        return all([observer.leaves(caller) for observer in self._observers])

    def __call__(self, point: EntryPoint, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        for observer in reversed(self._observers):
            run = functools.partial(_around, observer, point, run, frame)
        return run(*args, **kwargs)


def _around(
    observer: Observer, point: EntryPoint, run: Run, frame: types.FrameType, /, *args: Any, **kwargs: Any
) -> Seen:
    return observer(point, run, frame, args, kwargs)


class _Observing(threading.local):
    inside = False  # of a call that is observed
    op = ""  # whose call that is


_thread = _Observing()


def observed(
    point: EntryPoint, observer: Observer, plain: Callable, run: Run, caller: types.FrameType, args: tuple, kwargs: dict
) -> Any:
    """Give one call to the observer; a call inside an observed call goes to `plain`."""
    if _thread.inside or is_dynamo_compiling():
        return plain(*args, **kwargs)
    _thread.inside, _thread.op = True, point.op
    try:
        return observer(point, run, caller, args, kwargs).result
    finally:
        _thread.inside, _thread.op = False, ""


def observed_op() -> str:
    """Return the op whose call is observed in this thread, "" for none."""
    return _thread.op


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


# What is logged

logger = logging.getLogger("hmpx")
_LEVEL = Flag("the level of the logger hmpx", lambda: logger.level, logger.setLevel)
_lock = process_state.new_lock()  # of what several threads count


class _Shown(logging.StreamHandler):
    """Writes to the current standard error, after all output of the program so far.

    So where both streams go to one file or pipe, a decision stands between the lines that were printed before and after
    it, and not before all of them.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            sys.stdout.flush()
        if sys.stderr is not None:
            self.setStream(sys.stderr)
            super().emit(record)


class VerboseLog:
    """Observes the ops that have a rule, and collects the decisions of one conversion.

    A user who asked for it sees it: where no handler would show INFO records of the logger "hmpx", one that writes to
    standard error is attached while it is open. All that hmpx logs meanwhile goes through it, warnings too.
    """

    everything = False

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self.goes_on = False  # whether the next `apply` counts on

    def leaves(self, caller: types.CodeType) -> bool:
        return False

    def __call__(self, point: EntryPoint, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        seen = run(*args, **kwargs)
        if seen.casting and point.rule is not None:
            dtypes = [_dtypes(values) for values in ((args, kwargs), (seen.args, seen.kwargs), (seen.result,))]
            head = point.op if point.label == point.op else f"{point.op} as {point.label}"
            outside = dtypes[0] != dtypes[1] and is_outside(point.op, args, kwargs, frame)
            where = f"{users_line(frame)}{', outside of any model' if outside else ''}"
            self._record(f"{head}, {point.rule}: {' -> '.join(dtypes)} at {where}")
        return seen

    def _record(self, line: str) -> None:
        with _lock:
            self._seen[line] += 1
            first = self._seen[line] == 1
        if first:
            logger.info("hmpx: %s", line)

    def apply(self, changes: Changes) -> None:
        """Show the log from here on. When undone, or at the program's end, log the count of each decision."""
        if not logger.isEnabledFor(logging.INFO):
            changes.put(_LEVEL, logging.INFO)
        if not logger.hasHandlers():
            handler = _Shown()
            handler.setFormatter(logging.Formatter("%(message)s"))
            logger.addHandler(handler)
            changes.callback(logger.removeHandler, handler)
        changes.callback(self._close)
        atexit.register(self._close)

    def _close(self) -> None:
        atexit.unregister(self._close)
        if self.goes_on:
            return
        for line, count in self._seen.most_common():
            logger.info("hmpx: %6d times %s", count, line)
        self._seen.clear()


def _dtypes(values: Any) -> str:
    found: list[str] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(dtype_name(value.dtype))
        elif isinstance(value, list | tuple | dict):
            inside = _dtypes(value.values() if isinstance(value, dict) else value)
            found += [inside] if inside else []
    return ", ".join(found)


class FirstStep:
    """A part of a conversion whose ops run in `low`; with the next conversion it looks again."""

    def __init__(self, low: torch.dtype) -> None:
        self._low, self._looked = low, False

    def apply(self, changes: Changes) -> None:
        if not self._looked:
            first_steps.append(self._look)
            changes.callback(self._end)

    def _end(self) -> None:
        with contextlib.suppress(ValueError):  # it has looked
            first_steps.remove(self._look)

    def _look(self) -> None:
        self._looked = True
        self._end()
        if self._low is torch.float16 and not _has_scaler():
            logger.warning(
                "hmpx: ops run in FP16, and there is no enabled GradScaler: gradients below 6e-8 become 0. Write "
                "scaler = torch.amp.GradScaler(device), and scaler.scale(loss).backward(), scaler.step(optimizer), "
                "scaler.update() in each step"
            )
        if self._low is torch.bfloat16 and torch.cuda.is_initialized() and not torch.cuda.is_bf16_supported(False):
            logger.warning(
                "hmpx: ops run in BF16, and this GPU (%s) has no instructions for it, so that they are slow. The "
                "recipe apex-o1, or convert(low_precision=torch.float16), runs them in FP16; scale the loss then",
                torch.cuda.get_device_name(),
            )


def positions_in_words(policy: Policy) -> str:
    """Say what a policy with `mul` in low precision does to angles that are positions times frequencies; else ""."""
    if policy.listed("mul") not in LOW_RULES.values():
        return ""
    whole = {torch.bfloat16: 256, torch.float16: 2048}[policy.low_precision]
    return (
        f"mul rounds positions above {whole} (rotary angles that no region of torch.autocast holds in FP32); "
        "fp32: [mul] in the module that multiplies them"
    )


def say_once(level: int, said: str, frame: types.FrameType) -> None:
    """Log a message with the user's line, once in a conversion."""
    with _lock:
        new = said not in process_state.logged_once
        process_state.logged_once.add(said)
    if new:
        logger.log(level, "hmpx: %s: %s", users_line(frame), said)


def say_beats_island(what: str, frame: types.FrameType) -> None:
    """Log, once, that ops are cast inside ``torch.autocast(enabled=False)``, and who says so."""
    say_once(logging.INFO, f"{what} casts inside torch.autocast(enabled=False)", frame)


def _has_scaler() -> bool:
    scalers = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.amp.GradScaler))
    return any(scaler.is_enabled() for scaler in scalers)
