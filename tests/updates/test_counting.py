"""The step number and the seed in checkpoints and groups; `test_programs.py` has groups that come, go and change."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import hmpx

BF16 = torch.bfloat16


def make():
    params = [nn.Parameter(torch.full((40,), 1.0 + i, dtype=BF16)) for i in range(3)]
    groups = [{"params": [(f"p{i}", p)], "lr": 0.125} for i, p in enumerate(params)]
    return params, optim.SGD(groups)


def step(params, optimizer):
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    optimizer.step()


def test_the_first_group_of_a_checkpoint_carries_them_alone():
    params, optimizer = make()
    hmpx.attach(optimizer, seed=5)
    for _ in range(3):
        step(params, optimizer)
    optimizer.param_groups.reverse()
    groups = optimizer.state_dict()["param_groups"]
    assert groups[0]["hmpx_step"] == 3 and groups[0]["hmpx_seed"] == 5
    assert not any(key.startswith("hmpx") for group in groups[1:] for key in group)


def test_a_checkpoint_without_numbers_starts_at_zero_and_one_with_them_there():
    params, optimizer = make()
    hmpx.attach(optimizer)
    plain = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        step(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    for checkpoint, number in ((plain, 1), (saved, 4), (plain, 1)):
        optimizer.load_state_dict(checkpoint)
        step(params, optimizer)
        assert optimizer.param_groups[0]["hmpx_step"] == number


@pytest.mark.parametrize("cls, flat", [(optim.SGD, False), (optim.AdamW, True)])
def test_what_torch_takes_to_see_the_state_does_not_count(flat, cls):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def fresh():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).bfloat16()
        optimizer = cls([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1)
        hmpx.attach(optimizer, "split", seed=3, model=model)
        return model, optimizer

    model, optimizer = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    get_optimizer_state_dict(model, optimizer, options=options)
    assert optimizer.param_groups[0]["hmpx_step"] == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    for _ in range(2):
        model(torch.ones(2, 4, dtype=BF16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    again, loaded = fresh()
    set_optimizer_state_dict(again, loaded, copy.deepcopy(saved), options=options)
    assert [loaded.param_groups[0][key] for key in ("hmpx_step", "hmpx_seed")] == [2, 3]


def test_numbers_that_are_written_into_the_groups_count():
    """ZeRO-1 loads a checkpoint so: it writes the numbers into the groups of the inner optimizer."""
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    optimizer = optim.SGD([("p", p)], lr=0.125)
    hmpx.attach(optimizer, seed=9)
    optimizer.param_groups[0]["hmpx_step"] = 6
    p.grad = torch.ones_like(p)
    optimizer.step()
    group = optimizer.state_dict()["param_groups"][0]
    assert (group["hmpx_step"], group["hmpx_seed"]) == (7, 9)
