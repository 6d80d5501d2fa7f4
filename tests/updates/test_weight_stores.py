"""The ways to hold weights are equals: none is made from another, and each holds what it is given to write."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from hmpx.updates.holding.held import RoundingKey
from hmpx.updates.holding.segment import Segment
from hmpx.updates.holding.stores import WAYS
from tests.support.oracle import to_24_bits


def test_no_store_is_derived_from_another():
    assert not any(issubclass(one, other) for one, other in permutations(WAYS.values(), 2))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_store_reads_what_was_written_in_parts_and_keeps_what_it_says_beside(way):
    p = torch.nn.Parameter(torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).bfloat16())
    whole, key, store = Segment(p, "p"), RoundingKey(seed=1, step=2), WAYS[way](p)
    assert store.has_masters == (way in ("master", "split", "split8"))
    new = p.float() + 2**-12
    read = torch.empty_like(new)
    store.begin()
    store.read(whole, read)
    assert torch.equal(read, p.float())
    for part in whole.parts(64, order=None):
        store.read(part, torch.empty(part.count))
        store.write(part, new.view(-1)[part.start : part.stop], "p", key)
    store.read(whole, read)
    expected = {"master": new, "split": new, "split8": to_24_bits(new, seed=1, step=2, name="p")}
    assert torch.equal(read, expected.get(way, p.float()))
    assert ((p.float() - new).abs() <= new.abs() * 2**-7).all()
    checks = 2 * p.numel() if way in ("split", "split8") else 0  # of a small parameter, one for each weight
    assert sum(t.nbytes for t in store.beside()) == p.numel() * int(store.bytes_beside) + checks
