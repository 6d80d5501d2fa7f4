"""Ends a script after as many steps as were asked for."""

from __future__ import annotations

import contextlib
import sys
from typing import NoReturn


class Enough(BaseException):
    """Ends the script: as many steps as were asked for are done."""


def end() -> NoReturn:
    """End the script. Its `finally` blocks run, and may save something."""
    said = "hmpx: doctor is ending the script; what its `finally` blocks save is of an early step"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the script may have closed it
        print(said, file=sys.stderr)
    raise Enough
