"""What BF16 brings is measured rightly where a device runs behind the program."""

from __future__ import annotations

import torch

from hmpx.insight.tuning import worth


class Device:
    """It takes work at once and does it later, as CUDA does; the first piece takes it long. The clock is its own."""

    def __init__(self):
        self.clock, self.done, self.pieces = 0.0, 0.0, 0

    def work(self):
        self.pieces += 1
        self.done = max(self.done, self.clock) + (1.0 if self.pieces == 1 else 2**-15)

    def synchronize(self):
        self.clock = max(self.clock, self.done)


def test_times_are_those_of_work_that_is_done_and_a_slow_beginning_is_not_in_them(monkeypatch):
    """Five rounds of 2e-4 seconds at least, seven pieces each, after the first and one that says how long one takes."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", device.synchronize)
    monkeypatch.setattr(worth, "perf_counter", lambda: device.clock)
    assert (worth.seconds(device.work), device.pieces) == (2**-15, 1 + 1 + 5 * 7)
