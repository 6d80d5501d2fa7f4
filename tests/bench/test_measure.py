"""What measures memory, for the tables of `bench` and for tests: against allocations of known size."""

from __future__ import annotations

import torch

from hmpx.bench.measure import memory

CPU = torch.device("cpu")


def test_the_peak_and_what_stays_of_allocations_of_known_size():
    kept = []

    def work():
        large = torch.empty(50_000)  # 200 kB, gone before the next
        del large
        kept.append(torch.empty(10_000))
        both = torch.empty(20_000), torch.empty(10_000, dtype=torch.float64)
        del both

    peak, stays = memory(work, CPU)
    assert abs(stays - 40_000) < 1000 and abs(peak - 200_000) < 1000
    kept.clear()


def test_nothing_taken_is_nothing():
    assert memory(lambda: None, CPU) == (0, 0)
