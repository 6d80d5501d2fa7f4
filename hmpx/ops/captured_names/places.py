"""Places outside torch that hold a function of torch: the old value, ours, and how to restore the old one.

Unlike `changes`, which is for torch: the holders are a user's own, so none is kept alive, none is warned of that holds
something else by now, and one that cannot be written to any more does not stop the rest.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("hmpx")


@dataclass(frozen=True)
class Capture:
    """A place that holds a function of torch under a name of its own. `reason`: why it still does."""

    where: str
    function: str
    reason: str = ""

    @property
    def rebound(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return f"{self.where} holds {self.function}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, eq=False)
class _Place:
    where: str
    holder: Callable[[], Any]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    old: Any
    new: Any


class Places:
    """Every changed place, in order.

    A holder that Python can refer to weakly is: none lives longer for it. A plain list or dict stays until `undo`.
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}
        self._numbers = itertools.count()

    def put(
        self,
        where: str,
        holder: Any,
        read: Callable[[Any], Any],
        write: Callable[[Any, Any], None],
        old: Any,
        new: Any,
    ) -> None:
        """Replace `old` by `new`. The change is noted first, so that an interrupt loses nothing.

        Raises:
            RuntimeError: something else stands there by now.
        """
        if read(holder) is not old:
            raise RuntimeError("something else was put there meanwhile")
        number = next(self._numbers)
        self._places[number] = _Place(where, self._reference(holder, number), read, write, old, new)
        write(holder, new)

    def mark(self) -> int:
        """A position for `undo` to stop at."""
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
                if holder is not None and place.read(holder) is place.new:
                    place.write(holder, place.old)
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
