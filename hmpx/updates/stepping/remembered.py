"""Observations about an optimizer that are kept from one step to the next."""

from __future__ import annotations

from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

T = TypeVar("T")


class Remembered(WeakKeyDictionary[Optimizer, T]):
    """By optimizer, as long as it lives. A copy, or what comes out of a pickle, begins with nothing."""

    def __reduce__(self) -> tuple[type, tuple]:
        return Remembered, ()

    def __deepcopy__(self, memo: dict) -> Remembered[Any]:
        return Remembered()
