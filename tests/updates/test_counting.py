"""The step number and the seed in checkpoints and groups; `test_programs.py` has groups that come, go and change."""

import contextlib
import copy

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import hmpx

BF16, SWAP = torch.bfloat16, torch.utils.swap_tensors


def make():
    params = [nn.Parameter(torch.full((40,), 1.0 + i, dtype=BF16)) for i in range(3)]
    groups = [{"params": [(f"p{i}", p)], "lr": 0.125} for i, p in enumerate(params)]
    return params, optim.SGD(groups)


def step(params, optimizer):
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    optimizer.step()


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


@pytest.mark.parametrize("key", ["hmpx_step", "hmpx_seed"])
@pytest.mark.parametrize("value", [-1, 1 << 64, 2.0, True, "3"])
def test_numbers_that_are_none_of_64_bits_are_refused_where_they_are_written_or_loaded(key, value):
    params, optimizer = make()
    hmpx.attach(optimizer)
    step(params, optimizer)
    before, groups = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict()["param_groups"])
    for wrong in (value, None):
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0] |= {key: wrong, "lr": 7.0}
        with pytest.raises(hmpx.HmpxError, match=rf"'{key}' is .*, not an integer in \[0, 2\^64\); nothing was loaded"):
            optimizer.load_state_dict(saved)
        assert optimizer.state_dict()["param_groups"] == groups
    optimizer.param_groups[0][key] = value
    with pytest.raises(hmpx.HmpxError, match=f"param_groups' '{key}' is .*, not an integer in .*no step was taken"):
        step(params, optimizer)
    assert all(map(torch.equal, params, before))
    optimizer.param_groups[0][key] = (1 << 64) - 1
    step(params, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # the last number is followed by the first
    assert optimizer.param_groups[0]["hmpx_step"] == (0 if key == "hmpx_step" else 2)


@pytest.mark.parametrize("how", ["attach", "region", "prepare"])
def test_an_optimizer_that_is_made_anew_does_not_repeat_random_numbers(how):
    """200 steps of 1e-5 in 40 rounds: in the mean the weights go the way of FP32, whoever stays is none of most."""
    model = nn.Linear(64, 64, bias=False)
    nn.init.uniform_(model.weight, 0.5, 1.5)
    model.bfloat16()
    start = model.weight.detach().double()
    for _ in range(40):
        optimizer = optim.SGD(model.parameters(), lr=1e-5)
        if how == "attach":
            hmpx.attach(optimizer)
        if how == "prepare":
            hmpx.prepare(model, optimizer, {"parameter_dtype": None, "opt_level": None, "weights": "stochastic"})
        for _ in range(5):
            model.weight.grad = torch.ones_like(model.weight)
            with hmpx.disable_casts() if how == "region" else contextlib.nullcontext():
                optimizer.step()
    moved = start - model.weight.detach().double()
    assert moved.mean().item() == pytest.approx(200e-5, rel=0.1) and (moved == 0).double().mean() < 0.7
    hmpx.restore()


class NotesOverflows(optim.Optimizer):
    """Has an attribute that is called as GradScaler's is, and that it leaves at 1."""

    found_inf = torch.ones(())

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-5})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=1e-5)


def test_an_attribute_that_no_gradscaler_has_set_skips_no_step():
    p = nn.Parameter((torch.rand(64, 64) + 0.5).bfloat16())
    optimizer = NotesOverflows([p])
    hmpx.attach(optimizer)
    step([p], optimizer)
    step([p], optimizer)
    assert optimizer.param_groups[0]["hmpx_step"] == 2


def test_an_optimizer_of_parameters_with_several_numbers_goes_on_from_the_last():
    """One of them was stepped more often than the others: by another optimizer, before."""
    params, first = make()
    hmpx.attach(first)
    step(params, first)
    second = optim.SGD([("p1", params[1])], lr=0.125)
    hmpx.detach(first)
    hmpx.attach(second)
    for _ in range(4):
        step(params[1:2], second)
    hmpx.detach(second)
    third = optim.SGD([{"params": [(f"p{i}", p)], "lr": 0.125} for i, p in enumerate(params)])
    hmpx.attach(third)
    step(params, third)
    assert third.param_groups[0]["hmpx_step"] == 6


def test_numbers_that_are_given_or_loaded_outrank_those_of_the_parameters():
    params, first = make()
    hmpx.attach(first)
    for _ in range(3):
        step(params, first)
    saved = copy.deepcopy(first.state_dict())
    for how, number in (("", 4), ("seed", 1), ("checkpoint", 4), ("copy", 6), ("detach", 7)):
        optimizer = optim.SGD([{"params": [(f"p{i}", p)], "lr": 0.125} for i, p in enumerate(params)])
        hmpx.attach(optimizer, seed=0 if how == "seed" else None)
        if how == "checkpoint":
            optimizer.load_state_dict(saved)
        if how == "copy":
            step(params, optimizer)
            params, _ = copy.deepcopy((params, optimizer))
            optimizer = optim.SGD([{"params": [(f"p{i}", p)], "lr": 0.125} for i, p in enumerate(params)])
            hmpx.attach(optimizer)
        if how == "detach":
            hmpx.detach(optimizer)
            hmpx.attach(optimizer)
        step(params, optimizer)
        assert optimizer.param_groups[0]["hmpx_step"] == number, how


def test_numbers_outlive_restore_and_are_in_no_swaps_way(tmp_path):
    """torch swaps no tensor with a weak reference: there is none. A number stays with the object, as its optimizer."""
    params, _ = make()
    for number in (1, 2, 3):
        optimizer = optim.SGD([(f"p{i}", p) for i, p in enumerate(params)], lr=0.125)
        with hmpx.convert():
            hmpx.attach(optimizer)
            step(params, optimizer)
            assert optimizer.param_groups[0]["hmpx_step"] == number
            for p in params:
                other = nn.Parameter(p.detach().clone())
                SWAP(p, other)  # as code does that has imported it before
                SWAP(p, other)
                torch.utils.swap_tensors(p, other)
            hmpx.detach(optimizer)
        hmpx.restore()
    torch.save(params, tmp_path / "weights")
    assert all(map(torch.equal, torch.load(tmp_path / "weights", weights_only=True), params))
