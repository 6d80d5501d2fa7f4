"""Is casting on, here, in this thread.

The one owner of that state. Three things decide, the innermost first: a region opened in this thread
(`disable_casts`, `enable_casts`, the inside of a listed Python function, an optimizer step), the default that
`convert(enabled=...)` set, and whether torch is converted at all.

`off_somewhere` is empty while every thread casts, so the wrapper of an op pays one truth test for all of this. Each
conversion's wrappers hold the one of their time: `retire` leaves it to them, with an entry that stays.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch import is_autocast_enabled, set_autocast_enabled


@dataclass(frozen=True)
class Rounding:
    """How an optimizer step inside a region writes BF16 parameters: stochastic rounding, keyed by `seed`."""

    seed: int | None = None


class _Thread(threading.local):
    """What one thread has open. `key` tells threads apart without asking the operating system.

    Regions are kept in a list because torch.compile replays what a function does to a list, and not what it does to an
    attribute of a `threading.local`.
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.open: list[tuple[bool, Rounding | None]] = []  # the innermost last


_keys = itertools.count(1)
_DEFAULT = 0  # the key under which off_somewhere says "off unless a region turns casts on"
_RETIRED = -1  # the key in the off_somewhere of wrappers whose conversion is gone

# Device types that torch knows and has no autocast rules for. torch.compile guards on their autocast state, and replays
# it when it runs the ops of a graph one by one, where nothing of ours is guarded on.
_OFF, _ON = "maia", "ipu"

off_somewhere: dict[int, bool] = {}
_thread = _Thread()
_converted = False


def casts_off() -> bool:
    """Whether ops called from this thread, now, run uncast."""
    opened = _thread.open
    return not opened[-1][0] if opened else _DEFAULT in off_somewhere


def casts_off_in_graph() -> bool:
    """The same for an op of a graph that is being compiled, which may stand in a region of the compiled code."""
    return is_autocast_enabled(_OFF) or (not is_autocast_enabled(_ON) and bool(off_somewhere) and casts_off())


def casts_on() -> bool:
    """Whether torch is converted and ops called from this thread, now, are cast."""
    return _converted and not (off_somewhere and casts_off())


def casting() -> bool | None:
    """What this thread's innermost region says; None outside of one."""
    return _thread.open[-1][0] if _thread.open else None


def rounding() -> Rounding | None:
    """How this thread's innermost `disable_casts` region writes BF16 parameters; None outside of one."""
    return _thread.open[-1][1] if _thread.open else None


def set_converted(converted: bool, *, enabled: bool = True) -> None:
    """Record that a conversion was installed or taken away, and whether it casts outside of any region."""
    global _converted
    _converted = converted
    if converted and not enabled:
        off_somewhere[_DEFAULT] = True
    else:
        off_somewhere.pop(_DEFAULT, None)


def retire() -> None:
    """Turn casts off for good in the wrappers that hold `off_somewhere`; a new one serves everybody else."""
    global off_somewhere
    old, off_somewhere = off_somewhere, {}
    off_somewhere.update(old)
    old[_RETIRED] = True


def enter(casting: bool, how: Rounding | None = None) -> None:
    """Turn casts on or off in this thread, until `leave`."""
    before = _thread.open
    if not before or before[-1][0] is not casting:
        _announce(casting)
    before.append((casting, how))


def leave() -> None:
    """What was before the last `enter`."""
    opened = _thread.open
    casting, _ = opened.pop()
    outer = opened[-1][0] if opened else None
    if outer is not casting:
        _announce(outer)


def _announce(casting: bool | None) -> None:
    set_autocast_enabled(_OFF, casting is False)
    set_autocast_enabled(_ON, casting is True)
    if casting is False:
        off_somewhere[_thread.key] = True
    else:
        off_somewhere.pop(_thread.key, None)


@contextlib.contextmanager
def region(casting: bool, how: Rounding | None = None) -> Iterator[None]:
    """`enter` and `leave` around a block."""
    enter(casting, how)
    try:
        yield
    finally:
        leave()


def run_uncast(function, args, kwargs):
    """Call `function` with casts off inside: the op that was listed has decided for everything it calls."""
    enter(False, rounding())
    try:
        return function(*args, **kwargs)
    finally:
        leave()
