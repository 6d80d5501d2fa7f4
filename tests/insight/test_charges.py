"""What roundings are charged with, by numbers worked by hand."""

from __future__ import annotations

from hmpx.insight.tuning.charges import Charge, total


def test_charges_add_up_and_are_projected_on_each_direction():
    """By batch and run; run 0 is at the weights. Two batches, three directions."""
    one, other = Charge(), Charge()
    one.forward.update({(0, 0): 1.0, (0, 1): 1.5, (0, 2): 0.5, (0, 3): 1.0, (1, 0): 2.0, (1, 3): 6.0})
    other.forward.update({(0, 0): -0.5, (1, 1): 1.0})
    other.backward.update({(0, 1): 0.25, (1, 0): 1.0})
    both = total([one, other])
    assert both.changes(2) == [0.5, 2.0]
    assert both.projected(2, 3, 0.5) == [
        [(1.5 + 0.25 - 0.5) / 0.5, (1.0 - 3.0) / 0.5],
        [(0.5 - 0.5) / 0.5, (0.0 - 3.0) / 0.5],
        [(1.0 - 0.5) / 0.5, (6.0 - 3.0) / 0.5],
    ]
