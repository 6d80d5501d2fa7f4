"""What tensors were made by, as far as it takes to see a variance that is the difference of two means."""

from __future__ import annotations

import weakref
from typing import Any

from hmpx.insight.tensors import Tensor

_VIEWS = frozenset("unsqueeze squeeze view expand _unsafe_view reshape detach alias".split())


class Lineage:
    """Marks squares, means, means of squares and squares of means."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def follow(self, name: str, args: tuple, given: list[Tensor], out: Tensor) -> None:
        """One op."""
        first = given[0] if given else None
        before = self._mark(first)
        mark = ""
        if name in _VIEWS:
            mark = before
        elif name in ("mean", "sum", "div") and before == "square":
            mark = "mean of square" if name != "div" else "square"
        elif name == "mean" or (name == "sum" and not before):
            mark = "mean"
        elif name == "div" and before in ("mean", "mean of square"):
            mark = before
        elif name in ("pow", "square", "mul") and _is_square(name, args):
            mark = "square of mean" if before == "mean" else "square"
        if mark:
            if len(self._marks) > 4096:
                self.forget()
            self._marks[id(out)] = weakref.ref(out), mark

    def is_variance(self, args: tuple) -> bool:
        """Whether a difference is that of a mean of squares and the square of a mean."""
        return [self._mark(each) for each in args[:2]] == ["mean of square", "square of mean"]

    def forget(self) -> None:
        self._marks.clear()

    def _mark(self, tensor: Any) -> str:
        known = self._marks.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else ""


def _is_square(name: str, args: tuple) -> bool:
    if name == "pow":
        return isinstance(args[1], int | float) and args[1] == 2
    return name == "square" or args[0] is args[1]
