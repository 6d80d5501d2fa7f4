"""Ends a script after as many steps as were asked for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from hmpx.base.changes import Attribute, Changes
from hmpx.insight.text_table import short_place
from hmpx.ops.wrapping.callers import users_line


class Enough(BaseException):
    """Ends the script: as many steps as were asked for are done."""


def end(changes: Changes) -> NoReturn:
    """End the script. Its `finally` blocks run, and whoever saves something in them is told so."""
    told: list[str] = []
    for owner, name in ((torch, "save"), (torch.nn.Module, "state_dict")):
        place = f"{'torch' if owner is torch else 'torch.nn.Module'}.{name}"
        changes.put(Attribute(owner, name, place), _told_once(getattr(owner, name), place, told))
    raise Enough


def _told_once(function: Callable, name: str, told: list[str]) -> Callable:
    @functools.wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if not told:
            told.append(name)
            where = short_place(users_line(sys._getframe(1)))
            said = f"hmpx: doctor is ending the script, and {where} calls {name}: what it saves is of an early step"
            print(said, file=sys.stderr)
        return function(*args, **kwargs)

    return telling
