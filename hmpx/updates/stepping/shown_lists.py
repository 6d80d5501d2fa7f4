"""The lists of parameters in `param_groups`, those of optimizers inside too, and what a step shows in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any

import torch

Optimizer = torch.optim.Optimizer


class ShownParameters:
    """A block in which the lists of `param_groups` hold other parameters. The lists stay the same objects."""

    def __init__(self, lists: list[list[Any]], shown: list[list[Any]]) -> None:
        self._lists, self._shown = lists, shown
        self._before: list[list[Any]] = []

    def show(self) -> None:
        self._before = [list(params) for params in self._lists]
        for params, shown in zip(self._lists, self._shown, strict=True):
            params[:] = shown

    def hide(self) -> None:
        for params, before in zip(self._lists, self._before, strict=False):
            params[:] = before

    def are_as_shown(self) -> bool:
        """Whether the lists hold what they were shown with."""
        return all(map(are_same, self._lists, self._shown))

    def __enter__(self) -> None:
        self.show()

    def __exit__(self, *exception: object) -> None:
        self.hide()


def nested(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yield `optimizer` and every optimizer that it holds in an attribute, directly, in a list or in a dict."""
    found = [optimizer]
    for member in found:
        yield member
        for value in vars(member).values():
            if value is member.state:
                continue
            inner = value.values() if isinstance(value, dict) else value
            inner = inner if isinstance(value, (list, tuple, dict)) else (value,)
            found += [o for o in inner if isinstance(o, Optimizer) and not any(o is seen for seen in found)]


def all_lists(members: list[Optimizer]) -> list[list[Any]]:
    """Return the lists of parameters of these optimizers, which may share some."""
    lists = chain.from_iterable([lists_of(member.param_groups) for member in members])
    return list({id(params): params for params in lists}.values())


def lists_of(groups: list[dict]) -> list[list]:
    return [group["params"] for group in groups]


def groups_of(members: Iterable[Optimizer]) -> list[tuple[Optimizer, list[dict], list[list]]]:
    """Return the groups of each optimizer, and the lists in them."""
    return [(each, groups := each.param_groups[:], lists_of(groups)) for each in members]


def are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    """Whether these are the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def values_of(states: Iterable[dict[str, Any]]) -> list[Any]:
    """Return all values of these dicts."""
    return list(chain.from_iterable(map(dict.values, states)))
