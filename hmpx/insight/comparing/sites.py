"""The observer of a comparison: it finds the site of each call, and lets the pass that is running decide."""

from __future__ import annotations

import types
from typing import Protocol

from hmpx.insight.comparing.calls import Asked, Compared
from hmpx.insight.module_names import ModuleNames
from hmpx.ops.wrapping.callers import modules, users_frame
from hmpx.ops.wrapping.observing import Point, Run, Seen


class Pass(Protocol):
    """A run of the model, which says how each call is computed."""

    def around(self, asked: Asked) -> Seen: ...


class Sites:
    """The call sites that were met. now: the pass that is running; batch: its number."""

    everything = True

    def __init__(self) -> None:
        self._found: dict[tuple, Compared] = {}
        self._names = ModuleNames()
        self.now: Pass | None = None
        self.batch = 0

    def leaves(self, caller: types.CodeType) -> bool:
        return False

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        if self.now is None:
            return run(*args, **kwargs)
        user, module = users_frame(frame), next(modules(frame), None)
        line = (id(user.f_code), user.f_lineno) if user is not None else (0, 0)
        key = (*line, point.op, point.label, id(module))
        site = self._found.get(key)
        if site is None:
            where = "?" if user is None else f"{user.f_code.co_filename}:{user.f_lineno}"
            site = self._found[key] = Compared(point.op, where, self._names.of_module(module, frame))
            site.begin_batch(self.batch + 1)
        return self.now.around(Asked(site, point, run, args, kwargs))

    def begin_batch(self, number: int) -> None:
        self.batch = number
        for site in self._found.values():
            site.begin_batch(number + 1)

    def forget_results(self) -> None:
        """Let go of the results under the lists."""
        for site in self._found.values():
            for call in site.calls.values():
                call.results, call.decisions = [], []

    def end_batch(self) -> None:
        self.forget_results()
        for site in self._found.values():
            site.deltas.clear()
            site.decisions.clear()

    def compared(self) -> list[Compared]:
        """The sites that ran under the lists, in the order in which they were met."""
        return [site for site in self._found.values() if site.calls]
