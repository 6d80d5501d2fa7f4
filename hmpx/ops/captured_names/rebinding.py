"""Names taken before a patch: `from torch.nn.functional import gelu`, `ACT2FN["gelu"]`, `self.act = F.gelu`.

A pass over everything that is alive (modules, classes, functions, objects with attributes or slots), four containers
deep, puts the replacement where a function of torch is held: in dicts, lists, attributes, closures, default arguments,
in a `functools.partial`, which stays the same object, and in tuples and bound methods, which are made anew where they
are held. What cannot be changed (a set, a cache, a local variable of a running function) is reported. Keys of tables
are left alone, and so are torch's own tables: they are older than the patch, and want torch's functions. When those
come back, another pass looks for replacements that were taken in the meantime, there as well.

No code of what is looked through runs: no `values()` of a subclass of dict, no `__eq__`, no property. A module
that is patched when it is imported starts no pass: only its package is looked through then, and the rest when the
handle is next asked what it rebound. Of objects that `gc.freeze()` has hidden, only the modules are looked through.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from hmpx.changes import Changes, Part
from hmpx.ops.captured_names.places import Capture, Places
from hmpx.ops.captured_names.sweep import Sweep


class Replacing(Part, Protocol):
    """A part that puts replacements in the place of functions."""

    def replacements(self) -> list[tuple[Any, Any]]:
        """Pairs of an original and its replacement."""


class Rebinding:
    """Names captured elsewhere that hold replacements now."""

    def __init__(self) -> None:
        self._captures: dict[Capture, None] = {}
        self._places = Places()
        self._pending: dict[Any, Any] = {}  # function -> replacement, not looked for everywhere yet
        self._back: dict[Any, Any] = {}  # replacement -> function
        self._references: dict[int, int] = {}  # to replacements that nobody has been able to take yet, by identity

    @property
    def captures(self) -> list[Capture]:
        """One capture for each place. Searches for pending pairs; after an interrupt it may be called again."""
        pending = self._pending
        try:
            self._catch_up()
        except BaseException:
            self._pending = pending | self._pending
            raise
        return list(self._captures)

    def expect(self, replacements: Callable[[], Iterable[tuple[Any, Any]]]) -> None:
        """Note pairs that are about to be put in place; nobody can have captured a replacement yet.

        The references to each replacement are counted now. If there are no more of them when it is taken back, nobody
        holds it, and no pass looks for it.
        """
        self._back |= {new: old for old, new in replacements()}
        known = self._references.keys()
        self._references |= {id(new): sys.getrefcount(new) for new in self._back if id(new) not in known}

    def add(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        """Put each replacement wherever its original is held outside torch's own tables; if that fails, change nothing.

        Raises:
            BaseException: what interrupted it; every place is as it was then.
        """
        self._note(pairs)
        self._catch_up()

    def add_imported(self, pairs: Iterable[tuple[Any, Any]], modules: Iterable[types.ModuleType]) -> None:
        """The same during an import: in these modules now, elsewhere at the next `captures`."""
        replacements = self._note(pairs)

        def look(sweep: Sweep) -> None:
            for module in modules:
                sweep.one(module)

        self._run(replacements, look)

    def undo(self) -> None:
        """Restore every place, and rebind names that were captured in the meantime.

        An interrupt is raised when all is done.
        """
        self._pending.clear()
        back, self._back = self._back, {}
        interrupted = None
        try:
            self._places.undo()
        except BaseException as error:
            interrupted = error
        taken = [new for new in back if sys.getrefcount(new) > self._references.get(id(new), 0)]
        for _ in range(3 if taken else 0):
            try:
                Sweep({new: back[new] for new in taken}, Places(), back=True).everything()
                break
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _note(self, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        replacements = dict(pairs)
        self._back |= {new: old for old, new in pairs}
        self._pending |= replacements
        return replacements

    def _catch_up(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, {}
            self._run(pending, Sweep.everything)

    def _run(self, replacements: dict[Any, Any], look: Callable[[Sweep], object]) -> None:
        mark, sweep = self._places.mark(), Sweep(replacements, self._places)
        try:
            look(sweep)
            self._captures |= dict.fromkeys(sweep.captures)
        except BaseException:
            self._places.undo(mark)
            raise
        finally:
            sweep.let_go()


class WithCaptures:
    """Parts that replace functions, with the names under which the functions had been captured before.

    The names are taken back after the parts are: those that were taken meanwhile are looked for then.
    """

    def __init__(self, rebinding: Rebinding, *parts: Replacing) -> None:
        self._rebinding, self._parts = rebinding, parts

    def apply(self, changes: Changes) -> None:
        changes.callback(self._rebinding.undo)
        self._rebinding.expect(self._replacements)
        for part in self._parts:
            part.apply(changes)
        self._rebinding.add(self._replacements())

    def _replacements(self) -> list[tuple[Any, Any]]:
        return [pair for part in self._parts for pair in part.replacements()]
