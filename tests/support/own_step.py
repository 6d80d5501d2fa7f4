"""Where a test does not say `fused`, the optimizer's own step is taken: in regions, which have no such argument, and on
other ranks too.

For tests of the contract: they compare with the optimizer's own arithmetic, to the bit. The fixture is in `conftest`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from hmpx.updates.stepping import optimizer_classes, step

_in_force: list[bool] = []


@contextlib.contextmanager
def own_step() -> Iterator[None]:
    """Inside, a setting `fused` that nobody has given is False."""
    with mock.patch.object(
        step, "formula_used", lambda optimizer, fused: optimizer_classes.formula_used(optimizer, bool(fused))
    ):
        _in_force.append(True)
        try:
            yield
        finally:
            _in_force.pop()


def is_in_force() -> bool:
    """Whether `own_step` is; a new process is told so."""
    return bool(_in_force)
