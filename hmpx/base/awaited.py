"""Calls back when a module is imported. Import hooks cannot be removed, so each module has one, which looks here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import wrapt

from hmpx.base import process_state
from hmpx.base.changes import Changes


def when_imported(name: str, function: Callable[[ModuleType], object], changes: Changes) -> None:
    """Call `function(module)` as soon as a module is imported, before anybody else sees it, until `changes` are undone.

    A module that is there already is handed over at once.
    """
    if (module := sys.modules.get(name)) is not None:
        function(module)
        return
    if name not in process_state.awaited:
        process_state.awaited[name] = []
        wrapt.register_post_import_hook(_imported, name)
    waiting = process_state.awaited[name]
    if function not in waiting:
        changes.callback(_stop_waiting, name, function)
        waiting.append(function)


def _stop_waiting(name: str, function: Callable) -> None:
    waiting = process_state.awaited.get(name, [])
    if function in waiting:
        waiting.remove(function)


def _imported(module: ModuleType) -> None:
    for function in process_state.awaited.pop(module.__name__, []):
        function(module)
