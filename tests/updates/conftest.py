"""Fixtures of the tests of weight updates."""

from __future__ import annotations

import pytest

from hmpx.updates.stepping import batching


@pytest.fixture(params=["whole", "slices"])
def sliced(request, monkeypatch):
    """The same in slices of 64 elements at most, and with nothing cut."""
    if request.param == "slices":
        monkeypatch.setattr(batching, "_FLOOR", 64)
