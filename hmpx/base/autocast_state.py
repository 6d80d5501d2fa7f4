"""Writes whether casts are on into torch.autocast's state of two unused device types, which Dynamo guards on.

It carries ours into compiled graphs: torch.compile guards on it, and sets it again when it runs the ops of a graph one
by one, where it guards on nothing of ours. The first device type alone says that casts are off, the second that they
are on, and both that they are on in a scope whose number is too large for the second alone. The number is written in
dtypes; 0 is the device's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import get_autocast_dtype, is_autocast_enabled, set_autocast_dtype, set_autocast_enabled

_OFF, _ON = "maia", "ipu"
_ONS_OWN, _OFFS_OWN = get_autocast_dtype(_ON), get_autocast_dtype(_OFF)
_DTYPES = (_ONS_OWN, *sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)} - {_ONS_OWN}, key=str))
_DIGITS = {dtype: digit for digit, dtype in enumerate(_DTYPES)}
_BASE = len(_DTYPES)
DEVICES = (_OFF, _ON)
SCOPES = _BASE**2  # so many can be told apart


def casting() -> bool | None:
    """Whether casts are on here; None if no region has said so."""
    return True if is_autocast_enabled(_ON) else False if is_autocast_enabled(_OFF) else None


def scope() -> int:
    """The scope that holds here, while casts are on."""
    high = _DIGITS[get_autocast_dtype(_OFF)] if is_autocast_enabled(_OFF) else 0
    return _DIGITS[get_autocast_dtype(_ON)] + _BASE * high


def write(before: bool | None, was: int, casting: bool | None, scope: int) -> None:
    """What the innermost region says.

    Args:
        before, was: what the one says whose state may be written now.
        casting: whether casts are on; None for what holds outside of regions. scope: where they are on.
    """
    if not before and not casting:  # as around an optimizer's step
        return set_autocast_enabled(_OFF, casting is False)
    was, scope = (was if before else 0), (scope if casting else 0)
    if (before is True) is not (casting is True):
        set_autocast_enabled(_ON, casting is True)
    if was != scope or (casting and not before):  # a compilation that failed may have left another one
        set_autocast_dtype(_ON, _DTYPES[scope % _BASE])
    if was >= _BASE or scope >= _BASE:
        set_autocast_dtype(_OFF, _DTYPES[scope // _BASE] if scope >= _BASE else _OFFS_OWN)
        set_autocast_enabled(_OFF, casting is False or scope >= _BASE)
    elif (before is False) is not (casting is False):
        set_autocast_enabled(_OFF, casting is False)


def saved() -> Callable[[], None]:
    """A context that restores the state as it is now."""
    now = [(each, is_autocast_enabled(each), get_autocast_dtype(each)) for each in DEVICES]

    def put_back() -> None:
        for device, enabled, dtype in now:
            set_autocast_enabled(device, enabled)
            set_autocast_dtype(device, dtype)

    return put_back
