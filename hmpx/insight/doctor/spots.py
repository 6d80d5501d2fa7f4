"""Lines of the program at which something was found, each kind of thing once a line."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hmpx.insight.module_names import ModuleNames
from hmpx.ops.wrapping.callers import modules, users_frame


@dataclass
class Spot:
    """One line. said: what was found there the first time. amount: what adds up over the calls."""

    kind: str
    op: str
    where: str
    module: str
    said: str
    calls: int = 0
    amount: float = 0.0
    values: dict[str, float] = field(default_factory=dict)

    def add(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.values[name] = self.values.get(name, 0.0) + number


class Spots:
    """The lines, in the order in which they were found."""

    def __init__(self) -> None:
        self.module_names = ModuleNames()
        self._known: dict[tuple, Spot] = {}
        self._codes: list[Any] = []  # kept, so that no other gets the identity of one

    def note(self, kind: str, op: str, frame: types.FrameType, said: str, amount: float = 0.0) -> Spot:
        """Something was found in a call that `frame` made."""
        user = users_frame(frame)
        module = next(modules(frame), None)
        key = kind, op, id(user and user.f_code), user.f_lineno if user else 0, id(module)
        spot = self._known.get(key)
        if spot is None:
            where = f"{user.f_code.co_filename}:{user.f_lineno}" if user else ""
            spot = self._known[key] = Spot(kind, op, where, self.module_names.of_module(module, frame), said)
            self._codes.append((user and user.f_code, module))
        spot.calls += 1
        spot.amount += amount
        return spot

    def of(self, *kinds: str) -> Iterator[Spot]:
        yield from (spot for spot in self._known.values() if spot.kind in kinds)
