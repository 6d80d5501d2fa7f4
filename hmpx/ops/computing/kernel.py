"""What computes an op between the casts of a rule and torch's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kernel:
    """What computes an op in the place of torch's own function; it prints in words.

    backward: how the backward pass computes, in words. wrap: takes an op's name and torch's own function for it, and
    returns the function that computes the op, with this kernel where it fits.
    """

    words: str
    backward: str
    wrap: Callable[[str, Callable], Callable] = field(compare=False)

    def __str__(self) -> str:
        return self.words
