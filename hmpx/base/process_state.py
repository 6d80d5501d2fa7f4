"""Holds every variable of casts that belongs to the whole process and changes, and the handles in force.

Other code reads and sets these as attributes of this module; a variable that is never replaced by another object may be
imported by name. The regions that are open in one thread or task are in `region_state`. What belongs to one conversion
is in its handle. What can be computed again, such as the catalogue of ops, stays in the file that computes it.

`in_use` says how this process differs from one in which nothing is converted. `convert` and `activate` put an
`Installation` in force.
"""

from __future__ import annotations

import abc
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from hmpx.base.changes import Attribute, Changes
from hmpx.errors import HmpxError


def new_lock() -> Any:
    """Return a new lock, which one thread may hold several times, and which a forked child finds free.

    The child has none of its parent's other threads, one of which may hold it.
    """
    return over_forks(threading.RLock())


def over_forks(held: Any) -> Any:
    """Return a lock, which is free in children from here on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=held._at_fork_reinit)
    return held


# What is in force: the handles of `convert` and `activate`, by class. `lock` is held while one is put in force or taken
# away.
installed: dict[type, Any] = {}
lock = new_lock()

# Where casts are on (base.region_state). `converted`: whether torch is converted. `enabled`, `everywhere`: the
# arguments of `convert`. `off`: whether casts are off somewhere, and by which regions. The wrappers of a conversion
# hold one `Off`, and keep it when the conversion ends; the next conversion has a new one.
converted, enabled, everywhere = False, True, True


class Off:
    """`any`: whether some thread or task leaves some op uncast. `by`: the ids of the regions that are the cause."""

    __slots__ = ("any", "by")

    def __init__(self) -> None:
        self.any = False
        self.by: dict[int, bool] = {}


off = Off()

# Lists that a module or a region lays over others (ops.overlays). `overlays`: each at the index that is its number.
# `scopes`: each nesting of overlays, at the index that is its number, as the scope around it and its innermost overlay.
# `scope_numbers`: the number of each such pair. Number 0 is the conversion's own lists. All grow with the different
# lists of a program. `known_scopes`: those for which the conversion in force has wrappers; `learn` makes wrappers for
# more. `module_rules`: those in force (ops.module_rules). `wrap_forward`: what a conversion does for one of them.
overlays: list[Any] = [None]
scopes: list[tuple[int, int]] = [(0, 0)]
scope_numbers: dict[tuple[int, int], int] = {}
known_scopes: frozenset[int] = frozenset({0})
learn: Callable[[Iterable[int]], None] | None = None
# `casts_regions`: the overlay of each `hmpx.casts` object that is alive.
module_rules: WeakSet[Any] = WeakSet()
casts_regions: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
wrap_forward: Callable[[Any], None] | None = None

# The models that `hmpx.prepare` was given, as long as they live, each with its recipe (recipes.prepare).
prepared: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

# The outermost modules that have been called, by identity, each by a weak reference (ops.wrapping.switch): models, and
# those that keep an average. A new one with each conversion.
models: dict[int, Any] = {}
averages: dict[int, Any] = {}

# Who observes the calls of ops under the conversion that is in force (ops.wrapping.observing). `observers` are those
# that conversions to come take over.
observer: Any = None
observers: list[Any] = []

# Who looks at casts to FP8, by thread (insight.recording); empty while nobody does.
fp8_watchers: dict[int, Any] = {}

# How many gradients were rounded stochastically, by their name (ops.policies.fp8_format): of the conversion in force,
# or of products outside of one.
gradients_rounded: dict[str, int] = {}

# The examination of `hmpx.doctor` that is open (insight.doctor); at most one.
examined: list[Any] = []
# The words of a command line that name the script, or module, that `python -m hmpx doctor` runs, and its arguments.
script: list[str] = []
# What the command line of `python -m hmpx` runs: "script", with its arguments, and "recipe", both in words.
run: dict[str, str] = {}

# What is to be called when a module is imported, by its name (base.compiling).
awaited: dict[str, list[Callable[[types.ModuleType], object]]] = {}

# What conversions do at the first optimizer step inside them (ops.wrapping.observing).
first_steps: list[Callable[[], None]] = []

# What the conversion in force has logged, of messages that it logs once (ops.wrapping.observing).
logged_once: set[str] = set()

# The caches of casts of weights, by thread (ops.wrapping.weight_cache); empty while nobody caches. While one is open,
# `watching_writes` watches those ways to write to a tensor that leave no trace.
open_caches: dict[int, Any] = {}
watching_writes = Changes()

# Each code object that a wrapper runs, with its rule, by `id` (ops.wrapping.callers): two code objects from one source
# are equal. It grows with the wrappers that are written; these are kept, too.
code_rules: dict[int, tuple[types.CodeType, Any]] = {}


def variable(name: str) -> Attribute:
    """A variable of this module, as a target of `Changes`, which give it another object."""
    return Attribute(sys.modules[__name__], name, f"hmpx.base.process_state.{name}")


def in_use() -> dict[str, Any]:
    """What is in force or open, by the name of the variable; empty where nothing is."""
    states = {
        "installed": installed,
        "converted": converted,
        "off": off.by,
        "observer": observer,
        "observers": observers,
        "awaited": [module for module, waiting in awaited.items() if waiting],
        "first_steps": first_steps,
        "open_caches": open_caches,
        "module_rules": list(module_rules),
        "learn": learn,
        "examined": examined,
        "fp8_watchers": fp8_watchers,
    }
    return {name: value for name, value in states.items() if value}


# Handles. A second call replaces the first. A ``with`` around the second takes it away at its end and puts the first in
# force again, unless that has ended meanwhile

_kinds: list[type[Installation]] = []
Self = TypeVar("Self", bound="Installation")


class Installation(abc.ABC):
    """A handle; at most one of each class is in force. Subclasses implement `_change`."""

    def __init_subclass__(cls) -> None:
        _kinds.append(cls)

    def __init__(self) -> None:
        self._before: Installation | None = None  # what this one replaced
        self._entered = self._ended = False
        self._changes = Changes()

    @abc.abstractmethod
    def _change(self, changes: Changes) -> None:
        """Make every change that puts this handle in force."""

    def _apply(self) -> None:
        """Put this handle in force. If that fails, nothing has changed."""
        try:
            self._change(self._changes)
        except BaseException:
            self._changes.close()
            raise

    def _install(self) -> None:
        """Replace the handle in force by this one. If that fails, the old one is in force again."""
        kind = type(self)
        with lock:
            before = in_force(kind)
            _take_away(kind)
            try:
                self._apply()
            except BaseException:
                _give(kind, before)
                raise
            installed[kind], self._before = self, before
            if before is not None and not before._entered:
                before._before = None  # it was replaced for good, unless this one turns out to stand in a `with`

    @property
    def active(self) -> bool:
        """Whether this handle is in force now."""
        return in_force(type(self)) is self

    def restore(self) -> None:
        """End this handle; nothing happens if another one is in force."""
        with lock:
            self._ended = True
            if self.active:
                _take_away(type(self))
                if self._entered:
                    _give(type(self), self._before)

    def __enter__(self: Self) -> Self:
        with lock:
            if not self.active:
                raise HmpxError(f"{self!r} is not in force any more and cannot be entered: make a new one")
            self._entered = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def in_force(kind: type[Self]) -> Self | None:
    """The handle of this class that is in force."""
    return installed.get(kind)


def _take_away(kind: type[Installation]) -> None:
    handle = installed.pop(kind, None)
    if handle is not None:
        handle._changes.close()


def _give(kind: type[Installation], before: Installation | None) -> None:
    """Put the nearest enclosing handle that has not ended in force again."""
    while before is not None and before._ended:
        before = before._before
    if before is not None:
        before._apply()
        installed[kind] = before


def end_all() -> None:
    """End every handle of every class, the youngest class first, also those that a ``with`` would restore."""
    with lock:
        for kind in reversed(_kinds):
            handle = in_force(kind)
            _take_away(kind)
            while handle is not None:
                handle._ended, handle = True, handle._before
