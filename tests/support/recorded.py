"""What a recording of one call says."""

from __future__ import annotations

import hmpx


def escaped(call, *args, **kwargs):
    """The listed ops that no wrapper saw in a call, without the names that other tests' modules have captured."""
    with hmpx.record() as log:
        call(*args, **kwargs)
    return [line for line in log.escaped if " list" in line and " and ran in " in line]
