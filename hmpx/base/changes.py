"""Makes every change outside hmpx, and can undo it: old value, new value, how to restore.

Changes are applied in order and undone in reverse. A change is undone only if hmpx's value is still there. If somebody
else has put another value on top, that value stays, and the logger "hmpx" warns: what it wraps is hmpx's and does
nothing any more. If a target holds the value already, nothing is recorded, so that a later change by somebody else is
not undone.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from hmpx.base.raw import MISSING

logger = logging.getLogger("hmpx")


# Places that hold one value. label, verb: what a warning calls it, and a change of it.


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute in the owner's own namespace; an inherited attribute counts as missing."""

    owner: Any
    name: str
    label: str
    verb = "patched"

    def read(self) -> Any:
        return vars(self.owner).get(self.name, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


@dataclass(frozen=True, eq=False)
class Item:
    """The value of a key in a dict."""

    mapping: MutableMapping
    key: Any
    label: str
    verb = "patched"

    def read(self) -> Any:
        return self.mapping.get(self.key, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            del self.mapping[self.key]
        else:
            self.mapping[self.key] = value


@dataclass(frozen=True, eq=False)
class Cell:
    """A variable in the closure of a function."""

    cell: types.CellType
    label: str
    verb = "patched"

    def read(self) -> Any:
        return self.cell.cell_contents

    def write(self, value: Any) -> None:
        self.cell.cell_contents = value


@dataclass(frozen=True, eq=False)
class Flag:
    """A setting with a function that reads it and one that sets it."""

    label: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    verb = "set"


Target = Attribute | Item | Cell | Flag


class Changes:
    """Changes that belong together. `close()` undoes them in reverse order, all of them even if one fails.

    No `contextlib.ExitStack`: that keeps what is to be undone in closures of its own, where a search for names that
    somebody has captured would find it.

    >>> settings = {"mode": "plain"}
    >>> with Changes() as changes:
    ...     _ = changes.put(Item(settings, "mode", "settings"), "cast")
    ...     settings
    {'mode': 'cast'}
    >>> settings
    {'mode': 'plain'}
    """

    def __init__(self) -> None:
        self._undo: list[_Undo] = []

    def put(self, target: Target, value: Any) -> Any:
        """Make `target` hold `value` until this is closed; return what it held, `MISSING` for nothing."""
        before = target.read()
        if before is not value:
            self.callback(take_back, target, value, before)  # first: an interrupt may come between the two
            target.write(value)
        return before

    def callback(self, function: Callable[..., object], *args: Any) -> None:
        """Call this when everything younger is undone: the `remove` of a hook, for instance."""
        self._undo.append(_Undo(function, args))

    def close(self) -> None:
        """Undo everything, even if one undo fails; then raise the first failure. One that is interrupted runs again."""
        failure: BaseException | None = None
        while self._undo:
            undo = self._undo.pop()
            try:
                undo.function(*undo.args)
            except Exception as error:
                failure = failure or error
            except BaseException as error:
                failure = failure or error
                self._undo.append(undo)
        if failure is not None:
            raise failure

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Undo:
    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., object], args: tuple) -> None:
        self.function, self.args = function, args


def take_back(target: Target, ours: Any, before: Any) -> None:
    """Undo one change: `target` was given `ours` where there was `before`."""
    now = target.read()
    if now is ours:
        target.write(before)
    elif now is not before:
        logger.warning("%s was %s again after hmpx; that stays, and hmpx below it is inert", target.label, target.verb)
