"""No test of this folder looks at times."""

import pytest

from hmpx.insight.trials import tune


@pytest.fixture(autouse=True)
def steps_are_timed_for_a_moment(monkeypatch):
    """`tune` ends with three timings, which take as long as the rest of it."""
    monkeypatch.setattr(tune, "_TIMED", (0.0, 0.01))
