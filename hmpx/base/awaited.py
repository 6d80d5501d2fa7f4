"""Calls back when a module is imported. Import hooks cannot be removed, so each module has one, which looks here."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Protocol

import wrapt

from hmpx.base import process_state


class Waiting(Protocol):
    def take(self, module: ModuleType) -> None:
        """The module has just been imported; nobody else has seen it yet."""


def await_module(name: str, who: Waiting) -> None:
    """Call `who.take(module)` as soon as a module is imported, if `who` is alive then and has not stopped waiting."""
    known = name in process_state.awaited
    process_state.awaited.setdefault(name, weakref.WeakSet()).add(who)
    if not known:
        wrapt.register_post_import_hook(_imported, name)


def stop_waiting(who: Waiting) -> None:
    """Stop waiting for modules."""
    for waiting in process_state.awaited.values():
        waiting.discard(who)


def _imported(module: ModuleType) -> None:
    for who in list(process_state.awaited.pop(module.__name__, ())):
        who.take(module)
