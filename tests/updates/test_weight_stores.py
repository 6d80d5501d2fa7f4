"""The ways to hold weights are equals: none is made from another, and each has what the protocol asks for."""

from __future__ import annotations

import inspect
from itertools import permutations

import pytest
import torch

from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment
from hmpx.updates.weights import WAYS, MasterStore, WeightStore
from tests.support.oracle import to_24_bits


def methods(protocol):
    return {name for name, value in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")}


def test_no_store_is_derived_from_another():
    assert not any(issubclass(one, other) for one, other in permutations(WAYS.values(), 2))


@pytest.mark.parametrize("way", WAYS)
def test_a_store_has_the_methods_of_its_protocol(way):
    store = WAYS[way]()
    assert store.has_masters == (way in ("master", "split", "split8"))
    assert methods(MasterStore if store.has_masters else WeightStore) <= methods(type(store))


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_a_store_reads_what_was_written_in_parts_and_drops_what_it_held(way):
    p = torch.nn.Parameter(torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).bfloat16())
    whole, key, store = Segment(p, "p"), RoundingKey(seed=1, step=2), WAYS[way]()
    new = p.float() + 2**-12
    read = torch.empty_like(new)
    store.read_all([whole], [read])
    assert torch.equal(read, p.float())
    for part in whole.parts(64, order=None):
        store.read_all([part], [torch.empty(part.count)])
        store.write(part, new.view(-1)[part.start : part.stop], key)
    store.read_all([whole], [read])
    expected = {"master": new, "split": new, "split8": to_24_bits(new, seed=1, step=2, name="p")}
    assert torch.equal(read, expected.get(way, p.float()))
    assert ((p.float() - new).abs() <= new.abs() * 2**-7).all()
    if store.has_masters:
        assert sum(t.nbytes for t in store.held(p)) == p.numel() * int(store.bytes_beside)
        store.drop(p)
    assert store.held(p) == []
