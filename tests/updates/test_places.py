"""Slices of larger parameters that are no DTensors: the numbers are those of the whole one."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import hmpx
from hmpx.updates.stepping import batching
from tests.support import ranks
from tests.support.optimizers import UnlistedAdamW

BF16 = torch.bfloat16
SHAPES = {"experts": (4, 6, 160), "flat": (1000,), "columns": (8, 30)}
# Two ranks: experts by the first dimension, a flat partition, columns, whose memory has gaps.
CUTS = {
    "experts": lambda t: (t[:3].clone(), t[3:].clone(), (0, 0, 0), (3, 0, 0)),
    "flat": lambda t: (t[:333].clone(), t[333:].clone(), (0,), (333,)),
    "columns": lambda t: (t[:, :11], t[:, 11:], (0, 0), (0, 11)),
}
WAYS = [
    {},
    {"weights": "split8", "state_dtype": BF16},
    {"weights": "master", "fused": True},
    {"parameters": {"experts": {"state_dtype": "8bit"}}},
]


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}


def train(optimizer, params, cut, start=0, stop=4):
    for step in range(start, stop):
        for name, gradient in drawn(100 + step).items():
            params[name].grad = cut(name, gradient).clone()
        optimizer.step()
    return params


def slices(rank, attached, cls=optim.AdamW):
    def cut(name, tensor):
        return CUTS[name](tensor)[rank]

    params = {name: nn.Parameter(cut(name, tensor)) for name, tensor in drawn(3).items()}
    optimizer = cls(list(params.items()), lr=1e-2)
    places = {name: (shape, CUTS[name](torch.empty(shape))[2 + rank]) for name, shape in SHAPES.items()}
    hmpx.attach(optimizer, places=places, **attached)
    return optimizer, params, cut


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("floor", [batching._FLOOR, 128], ids=["whole", "in small slices"])
def test_slices_have_the_bits_of_the_whole_parameter(way, floor, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", floor)
    whole = {name: nn.Parameter(tensor) for name, tensor in drawn(3).items()}
    optimizer = optim.AdamW(list(whole.items()), lr=1e-2)
    hmpx.attach(optimizer, **{key: value for key, value in way.items() if key != "fused"})
    train(optimizer, whole, lambda name, tensor: tensor)
    for rank in range(2):
        _, params, cut = (made := slices(rank, way))
        train(*made)
        for name, p in params.items():
            assert torch.equal(p, cut(name, whole[name])), (name, rank)


@pytest.mark.parametrize("cls", [optim.AdamW, UnlistedAdamW])
def test_copies_and_checkpoints_keep_the_place(cls):
    expected = train(*slices(1, {}, cls))
    optimizer, params, cut = slices(1, {}, cls)
    train(optimizer, params, cut, 0, 2)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        own = dict(zip(params, other.param_groups[0]["params"], strict=True))
        train(other, own, cut, 2, 4)
        assert all(torch.equal(own[name], expected[name]) for name in own)
    again, fresh, _ = slices(1, {}, cls)
    with torch.no_grad():
        for name, p in fresh.items():
            p.copy_(params[name])
    again.load_state_dict(optimizer.state_dict())
    train(again, fresh, cut, 2, 4)
    assert all(torch.equal(fresh[name], expected[name]) for name in fresh)


@pytest.mark.parametrize(
    "places, options, message",
    [
        ({"wieght": ((4, 4), (0, 0))}, {}, "'wieght' is the name of no parameter; did you mean 'weight'?"),
        ({"weight": ((4, 4), (3, 0))}, {}, r"'weight' of the shape \(2, 4\) does not fit into \(4, 4\) at \(3, 0\)"),
        ({"weight": ((16,), (8,))}, {}, "its place is a shape and an offset of 2 numbers each"),
        ({"weight": 3}, {}, r"'weight' is 3, not \(shape of the whole, offsets\)"),
        ({"weight": ((4, 4), (-1, 0))}, {}, "not a shape and the first index of each dimension"),
        ({"weight": ((2, 8), (0, 4))}, {"state_dtype": "8bit"}, "'weight' is cut across rows"),
    ],
)
def test_a_place_that_cannot_be_is_refused(places, options, message):
    optimizer = optim.SGD(nn.Linear(4, 2, bias=False).bfloat16().named_parameters(), lr=0.1)
    with pytest.raises(hmpx.HmpxError, match=message):
        hmpx.attach(optimizer, places=places, **options)
    assert not hasattr(optimizer, "_hmpx_attachment")


def test_attaching_again_wants_the_same_place():
    optimizer = optim.SGD([("w", nn.Parameter(torch.ones(2, 4, dtype=BF16)))], lr=0.1)
    handle = hmpx.attach(optimizer, places={"w": ((4, 4), (2, 0))})
    assert handle is hmpx.attach(optimizer) is hmpx.attach(optimizer, places={"w": ((4, 4), (2, 0))})
    with pytest.raises(hmpx.HmpxError, match="is in force"):
        hmpx.attach(optimizer, places={"w": ((4, 4), (0, 0))})


def _told(rank, names, shape, attached, apart):
    """What a rank's logger says in two steps."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("hmpx").addHandler(handler)
    groups = [dist.new_group([each]) for each in range(2)]
    params = [(name, nn.Parameter(torch.ones(shape[rank], dtype=BF16))) for name in names]
    optimizer = optim.SGD(params, lr=0.1)
    hmpx.attach(optimizer, process_group=groups[rank] if apart else None, **attached)
    for _ in range(2):
        for _, p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    return [message for message in told if "Rounding goes by names" in message]


@pytest.mark.parametrize(
    "case, why",
    [
        ((["0.weight"], [4, 4], {}, False), "all ranks have a parameter '0.weight'"),
        ((["0.weight"], [4, 4], {}, True), "attached apart, have a parameter '0.weight'"),
        ((["w"], [4, 5], {}, True), "'w' has the shape"),
        ((["0.weight"], [4, 4], {"names": ["4.weight"]}, False), None),
        ((["w"], [4, 4], {}, False), None),
        ((["w"], [4, 5], {"places": {"w": ((9,), (0,))}}, True), None),
    ],
)
def test_names_that_seem_to_be_those_of_a_part_are_told_of_once(case, why):
    told = [message for each in ranks.run(2, _told, *case) for message in each]
    if why is None:
        assert not told
    else:
        assert told and all(why in message and "names=" in message and "places=" in message for message in told)
        assert len(told) == (1 if case[-1] else 2)  # apart, the second to look is told
