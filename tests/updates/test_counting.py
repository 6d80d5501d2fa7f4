"""The step number and the seed stay with the optimizer, whatever becomes of its groups."""

from __future__ import annotations

import copy
import pickle
from itertools import cycle

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import hmpx

BF16 = torch.bfloat16


def inserted(groups):
    groups.insert(0, {**groups[0], "params": [], "param_names": []})
    groups[0].pop("hmpx_step"), groups[0].pop("hmpx_seed")


def of_another(groups):
    """A group of an optimizer that has steps of its own."""
    p = nn.Parameter(torch.ones(3, dtype=BF16))
    other = optim.SGD([("foreign", p)], lr=0.125)
    with hmpx.disable_casts(seed=99):
        for _ in range(7):
            other.step()
    groups.insert(0, other.param_groups.pop())


def taken_out_and_put_back(groups):
    kept = [{k: v for k, v in group.items() if not k.startswith("hmpx")} for group in groups]
    groups.clear()
    groups.extend(kept)


CHANGES = [inserted, of_another, taken_out_and_put_back]


def make():
    params = [nn.Parameter(torch.full((40,), 1.0 + i, dtype=BF16)) for i in range(3)]
    groups = [{"params": [(f"p{i}", p)], "lr": 0.125} for i, p in enumerate(params)]
    return params, optim.SGD(groups)


def step(params, optimizer, seed, attached):
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    if attached:
        optimizer.step()
    else:
        with hmpx.disable_casts(seed=seed):
            optimizer.step()


@pytest.mark.parametrize(
    "change, attached, then",
    [
        *((change, True, then) for change, then in zip(CHANGES, cycle(["save and load", "pickle"]))),
        *((change, False, then) for change, then in zip(CHANGES, cycle(["go on", "pickle", "save and load"]))),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_groups_that_change_do_not_start_the_count_again(change, attached, then):
    params, optimizer = make()
    expected = [p.detach().clone() for p in params]
    if attached:
        hmpx.attach(optimizer, seed=5)
    for number in range(6):
        step(params, optimizer, 5 if number == 0 else None, attached)
        for i, p in enumerate(params):
            exact = expected[i].float() - 0.125 * torch.full((40,), 0.01, dtype=BF16).float()
            expected[i] = hmpx.stochastic_round(exact, seed=5, step=number, name=f"p{i}")
            assert torch.equal(p, expected[i]), (number, i)
        if number == 2:
            change(optimizer.param_groups)
            # Nobody but the attachment can put the numbers back into groups that lost them, for a pickle to carry.
            carried = attached or then != "pickle" or change not in (of_another, taken_out_and_put_back)
            if then == "pickle" and carried:
                order = [id(p) for group in optimizer.param_groups for p in group["params"]]
                optimizer = pickle.loads(pickle.dumps(optimizer))
                held = dict(zip(order, [p for g in optimizer.param_groups for p in g["params"]], strict=True))
                params = [held[id(p)] for p in params]
            if then == "save and load" and carried:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_the_first_group_of_a_checkpoint_carries_them_alone():
    params, optimizer = make()
    hmpx.attach(optimizer, seed=5)
    for _ in range(3):
        step(params, optimizer, None, True)
    optimizer.param_groups.reverse()
    groups = optimizer.state_dict()["param_groups"]
    assert groups[0]["hmpx_step"] == 3 and groups[0]["hmpx_seed"] == 5
    assert not any(key.startswith("hmpx") for group in groups[1:] for key in group)


def test_a_checkpoint_without_numbers_starts_at_zero_and_one_with_them_there():
    params, optimizer = make()
    hmpx.attach(optimizer)
    plain = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        step(params, optimizer, None, True)
    saved = copy.deepcopy(optimizer.state_dict())
    for checkpoint, number in ((plain, 1), (saved, 4), (plain, 1)):
        optimizer.load_state_dict(checkpoint)
        step(params, optimizer, None, True)
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
