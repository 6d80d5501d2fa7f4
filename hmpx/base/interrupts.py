"""Gives back what a call has taken, although an interrupt may come at any instruction.

A signal handler that raises, as that of Ctrl-C does, may do so between any two instructions: also in a `finally`, and
in the `__exit__` of a context manager. So what is to be given back is given back in a function that does no harm when
it runs twice, and runs again if anything has raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def giving_back(give_back: Callable[[], object], function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, and call `give_back` after it; twice if anything raises."""
    try:
        try:
            return function(*args, **kwargs)
        finally:
            give_back()
    except BaseException:
        give_back()
        raise
