"""What hmpx raises. Every message names the file and line (if there is one), the thing, and the nearest legal thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HmpxError(Exception):
    """Base of every error that hmpx raises."""


class OpListError(HmpxError, ValueError):
    """An op list file that cannot be read, or that contradicts itself."""


class UnknownOpError(OpListError):
    """A name in an op list that stands for nothing torch can call."""


class OptLevelError(HmpxError, ValueError):
    """An opt_level that does not exist, or arguments that do not go with it."""


# A user meets these as hmpx.X, so that is how a traceback spells them.
for _error in (HmpxError, OpListError, UnknownOpError, OptLevelError):
    _error.__module__ = "hmpx"


def nearest(name: str, legal: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'conv2d'?"`` for the closest legal name, or an empty string."""
    by_lowercase = {candidate.lower(): candidate for candidate in legal}
    close = difflib.get_close_matches(name.lower(), by_lowercase, n=1, cutoff=cutoff)
    return f"; did you mean {by_lowercase[close[0]]!r}?" if close else ""
