"""Names taken before a patch: `from torch.nn.functional import gelu`, `ACT2FN["gelu"]`, `self.act = F.gelu`.

A pass over everything that is alive (modules, classes, functions, objects with attributes), four containers deep, puts
the replacement where a function of torch is held: in dicts, lists, attributes, closures and default arguments. A
`functools.partial` gets it too, and stays the same object; tuples and bound methods are made anew. Other places (a
slot, a set, a key of a table, a property, a cache, a local variable of a running function) are reported. A handle that
is asked what escaped looks again, and names whoever else holds one by then (`holders`): a generator, say.
So are torch's own tables, which are older than the patch and want torch's functions. When a conversion ends, another
pass puts originals in the place of replacements that somebody has taken meanwhile, in torch's tables too.

No code of the objects runs: no `values()` of a subclass of dict, no `__eq__`, no property. The import of a module that
is patched then starts no pass: only its package is looked through at once, and the rest when the handle is next asked
what it rebound. Of objects that `gc.freeze()` has hidden, only the modules are looked through.
"""

from __future__ import annotations

import itertools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hmpx.base.changes import Changes
from hmpx.ops.captured_names.raw import Access
from hmpx.ops.captured_names.rewriting import CapturedName
from hmpx.ops.captured_names.sweep import Sweep

logger = logging.getLogger("hmpx")
_LATE = "it was put there after the search"


class Replacing(Protocol):
    """Puts replacements in the place of functions, until the changes are undone."""

    def apply(self, changes: Changes) -> None: ...

    def replacements(self) -> list[tuple[Any, Any]]:
        """Return pairs of an original and its replacement."""


class Rebinding:
    """Names captured elsewhere that hold replacements now."""

    def __init__(self) -> None:
        self._rebound: dict[CapturedName, None] = {}
        self._escaped: list[CapturedName] = []
        self._places = Places()
        self._pending: dict[Any, Any] = {}  # function -> replacement, not looked for everywhere yet
        self._back: dict[Any, Any] = {}  # replacement -> function
        self._references: dict[int, int] = {}  # to replacements that nobody has been able to take yet, by identity

    @property
    def rebound(self) -> list[CapturedName]:
        """Places that were changed. Searches for pending pairs; after an interrupt it may be called again."""
        self._catch_up()
        return list(self._rebound)

    @property
    def escaped(self) -> list[CapturedName]:
        """Whoever holds an original now. Searches, and changes nothing; after `undo` it says what was known then."""
        self._catch_up()
        if self._back:
            sweep = Sweep({old: new for new, old in self._back.items()}, lambda *place: None)
            try:
                sweep.everything()
                sweep.others()
                # functools.wraps has copied the attribute by which a wrapper of ours names its original.
                theirs = [c for c in sweep.captures if not c.where.endswith(".__hmpx_original__")]
                self._escaped = [c if c.reason else replace(c, reason=_LATE) for c in theirs]
            finally:
                sweep.let_go()
        return self._escaped

    def around(self, changes: Changes, *parts: Replacing) -> None:
        """Apply parts, and replace the names under which their functions had been captured before.

        The names are taken back after the parts are: those that were taken meanwhile are looked for then.
        """

        def replacements() -> list[tuple[Any, Any]]:
            return [pair for part in parts for pair in part.replacements()]

        changes.callback(self.undo)
        self.expect(replacements)
        for part in parts:
            part.apply(changes)
        self.add(replacements())

    def expect(self, replacements: Callable[[], Iterable[tuple[Any, Any]]]) -> None:
        """Note pairs that are about to be put in place; nobody can have captured a replacement yet.

        The references to each replacement are counted now. If there are as many when it is taken back, nobody kept
        the replacement, and no pass looks for it.
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
        """Put replacements into these modules, which are being imported; elsewhere at the next `captures`."""
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
                Sweep({new: back[new] for new in taken}, Places().put, back=True).everything()
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
        if pending := dict(self._pending):
            self._run(pending, Sweep.everything)
            for function in pending:  # an import meanwhile may have added others
                self._pending.pop(function, None)

    def _run(self, replacements: dict[Any, Any], look: Callable[[Sweep], object]) -> None:
        mark, sweep = self._places.mark(), Sweep(replacements, self._places.put)
        try:
            look(sweep)
            self._rebound |= dict.fromkeys(each for each in sweep.captures if each.rebound)
            self._escaped += [each for each in sweep.captures if not each.rebound]
        except BaseException:
            self._places.undo(mark)
            raise
        finally:
            sweep.let_go()


@dataclass(frozen=True, eq=False)
class _Place:
    where: str
    holder: Callable[[], Any]
    access: Access
    key: Any
    old: Any
    new: Any


class Places:
    """Every place that was changed, in order.

    Unlike `base.changes`, which is for torch: the holders are a user's own, so none is kept alive that can be referred
    to weakly (a plain list or dict stays until `undo`), a holder of something else by now is no reason for a warning,
    and one that cannot be written to any more does not stop the rest.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._numbers = itertools.count()

    def put(self, where: str, holder: Any, access: Access, key: Any, old: Any, new: Any) -> None:
        """Replace `old` by `new`. The change is noted first, so that an interrupt loses nothing.

        Raises:
            RuntimeError: something else stands there by now.
        """
        if access.read(holder, key) is not old:
            raise RuntimeError("something else was put there meanwhile")
        number = next(self._numbers)
        self._places[number] = _Place(where, self._reference(holder, number), access, key, old, new)
        access.write(holder, key, new)

    def mark(self) -> int:
        """Return a position for `undo` to stop at."""
        return next(self._numbers)

    def undo(self, mark: int = 0) -> None:
        """Restore the old values in reverse order, wherever ours still stands.

        An interrupt is raised when all is done.
        """
        interrupted = None
        while next(reversed(self._places), -1) >= mark:
            try:
                number, place = next(reversed(self._places.items()))
                holder = place.holder()
                if holder is not None and place.access.read(holder, place.key) is place.new:
                    place.access.write(holder, place.key, place.old)
                self._places.pop(number, None)
            except Exception as error:
                self._places.pop(number, None)
                logger.warning("%s: what stood there could not be put back: %s", place.where, error)
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _reference(self, holder: Any, number: int) -> Callable[[], Any]:
        places = self._places
        try:
            return weakref.ref(holder, lambda _: places.pop(number, None))
        except TypeError:
            return lambda: holder
