"""What `convert()` need not look through in most tests.

It looks through everything that is alive for captured names, and what test libraries bring along, a million objects and
two thousand modules, would cost each test a second. Nor does a record in most tests look for those who hold a function
where no name leads, which it does among all objects once more.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

from hmpx.ops import sweep

# They know no torch
_LIBRARIES = {"_pytest", "dill", "matplotlib", "mpmath", "numpy", "pluggy", "pygments", "scipy", "setuptools", "sympy"}
_LIBRARIES |= {"triton", "yaml", *sys.stdlib_module_names}
_BEFORE = sweep._OFF_LIMITS
_OTHERS = sweep.Sweep.others


def hide() -> None:
    """Take all objects out of the garbage collector's lists, and let these libraries' modules stay as they are."""
    gc.collect()
    gc.freeze()
    sweep.Sweep.others = lambda self: None
    _leave(_BEFORE | _LIBRARIES)


def hide_what_has_come() -> None:
    """After a test that leaves much, unless everything is shown."""
    if sweep._OFF_LIMITS != _BEFORE and len(gc.get_objects()) > 10_000:
        hide()


def show() -> None:
    """Have everything looked through, as in a user's process."""
    gc.unfreeze()
    sweep.Sweep.others = _OTHERS
    _leave(_BEFORE)


@contextlib.contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Leave the modules of more packages as they are, in here."""
    before = sweep._OFF_LIMITS
    _leave(before.union(packages))
    try:
        yield
    finally:
        _leave(before)


def _leave(packages: frozenset[str]) -> None:
    if packages != sweep._OFF_LIMITS:
        sweep._OFF_LIMITS = packages
        sweep._is_named_off_limits.cache_clear()
