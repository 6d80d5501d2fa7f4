"""The largest part of an order that holds: `compare` asks it of the lists, `tune` of all ops, by their worth."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

T = TypeVar("T")
PARTS = 8  # into which something is divided at once


def largest(
    order: Sequence[T],
    holds: Callable[[list[T]], bool],
    guess: Callable[[list[T], list[T]], int] = lambda kept, rest: len(rest) // 2,
    hopeless: Callable[[T, list[T]], bool] = lambda unit, kept: False,
) -> tuple[list[T], list[T]]:
    """Return what holds together, and what is left out. The first of the order are wanted most.

    Args:
        holds: whether a part holds; it is never asked about nothing.
        guess: called as guess(kept, rest), how many of the first of the rest probably hold beside what is kept.
        hopeless: called as hopeless(unit, kept), whether a unit need not be tried beside what is kept.
    """
    kept: list[T] = []
    left: list[T] = []
    rest = [*order]
    while rest:
        count = _longest_beside(kept, rest, holds, guess(kept, rest))
        kept += rest[:count]
        left += rest[count : count + 1]
        behind = rest[count + 1 :]
        rest = [unit for unit in behind if not hopeless(unit, kept)]
        left += [unit for unit in behind if unit not in rest]
    return kept, left


def _longest_beside(kept: list[T], rest: list[T], holds: Callable[[list[T]], bool], guess: int) -> int:
    return longest(len(rest), lambda n: holds(kept + rest[:n]), guess)


def longest(many: int, holds: Callable[[int], bool], guess: int) -> int:
    """Return how many of the first hold: all of them, or by bisection in growing steps from a guess."""
    few, step = 0, 1
    if holds(many):
        return many
    while many - few > 1:
        middle = min(max(guess, few + 1), many - 1)
        if holds(middle):
            few, guess = middle, middle + step
        else:
            many, guess = middle, middle - step
        step *= 2
    return few


def parts_of(unit: Collection[T], module_of: Callable[[T], str]) -> list[frozenset[T]]:
    """Divide by the outermost blocks in which modules differ; many blocks stay together by neighbours.

    What has one module has one part.
    """
    ordered = sorted(unit, key=lambda each: _block_key(module_of(each)))
    blocks: dict[tuple[str, ...], list[T]] = {}
    for depth in range(1, 2 + max(module_of(each).count(".") for each in ordered)):
        blocks = {}
        for each in ordered:
            blocks.setdefault(tuple(module_of(each).split(".")[:depth]), []).append(each)
        if len(blocks) > 1:
            break
    groups = [*blocks.values()]
    size = math.ceil(len(groups) / PARTS)
    return [frozenset(itertools.chain(*groups[i : i + size])) for i in range(0, len(groups), size)]


def _block_key(module: str) -> tuple:
    """Return a key by which block 10 stands behind block 9."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in module.split("."))
