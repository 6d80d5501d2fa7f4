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

import functools
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol

from hmpx.base.changes import Changes
from hmpx.base.raw import Access
from hmpx.ops.holders import CapturedName
from hmpx.ops.sweep import Sweep

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
        self._changes = Changes()
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
            self._changes.close()
        except BaseException as error:
            interrupted = error
        taken = [new for new in back if sys.getrefcount(new) > self._references.get(id(new), 0)]
        for _ in range(3 if taken else 0):
            try:
                Sweep({new: back[new] for new in taken}, functools.partial(_put, Changes()), back=True).everything()
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
        changes = Changes()
        self._changes.callback(changes.close)
        sweep = Sweep(replacements, functools.partial(_put, changes))
        try:
            look(sweep)
            self._rebound |= dict.fromkeys(each for each in sweep.captures if each.rebound)
            self._escaped += [each for each in sweep.captures if not each.rebound]
        except BaseException:
            changes.close()
            raise
        finally:
            sweep.let_go()


# The holders are a user's own: none is kept alive that can be referred to weakly, and something else that stands there
# by now is no reason for a warning.


def _put(changes: Changes, where: str, holder: Any, access: Access, key: Any, old: Any, new: Any) -> None:
    """Replace `old` by `new` until `changes` are undone, which are noted first, so that an interrupt loses nothing.

    Raises:
        RuntimeError: something else stands there by now.
    """
    if access.read(holder, key) is not old:
        raise RuntimeError("something else was put there meanwhile")
    changes.callback(_put_back, where, _reference(holder), access, key, old, new)
    access.write(holder, key, new)


def _put_back(where: str, reference: Callable[[], Any], access: Access, key: Any, old: Any, new: Any) -> None:
    try:
        holder = reference()
        if holder is not None and access.read(holder, key) is new:
            access.write(holder, key, old)
    except Exception as error:
        logger.warning("%s: what stood there could not be put back: %s", where, error)


def _reference(holder: Any) -> Callable[[], Any]:
    """Return a weak reference; of a plain list or dict, which has none, a strong one."""
    try:
        return weakref.ref(holder)
    except TypeError:
        return lambda: holder
