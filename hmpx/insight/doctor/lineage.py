"""What is known of tensors by the ops that made them; enough to see a variance that is the difference of two means."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

from hmpx.insight.tensors import Tensor

Mark = TypeVar("Mark")
VIEWS = frozenset(
    "view _unsafe_view reshape t transpose permute unsqueeze squeeze expand slice select split detach alias".split()
)
_MOST = 4096


class Marks(Generic[Mark]):
    """A mark on each of some tensors, as long as the tensor lives."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[Tensor], Mark]] = {}

    def get(self, tensor: Any) -> Mark | None:
        known = self._marks.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def put(self, tensor: Tensor, mark: Mark) -> None:
        if len(self._marks) > _MOST:
            self.forget()
        self._marks[id(tensor)] = weakref.ref(tensor), mark

    def forget(self) -> None:
        self._marks.clear()


class Lineage:
    """Marks squares, means, means of squares and squares of means."""

    def __init__(self) -> None:
        self.marks = Marks[str]()

    def follow(self, name: str, args: tuple, given: list[Tensor], out: Tensor) -> None:
        """One op."""
        before = self.marks.get(given[0]) if given else None
        mark = None
        if name in VIEWS:
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
            self.marks.put(out, mark)

    def is_variance(self, args: tuple) -> bool:
        """Whether a difference is that of a mean of squares and the square of a mean."""
        return [self.marks.get(each) for each in args[:2]] == ["mean of square", "square of mean"]


def _is_square(name: str, args: tuple) -> bool:
    if name == "pow":
        return isinstance(args[1], int | float) and args[1] == 2
    return name == "square" or args[0] is args[1]
