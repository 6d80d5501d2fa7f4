"""`AveragedModel` of BF16 weights, beside the same of FP32 copies of them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

import hmpx

FUNCTIONS = {
    "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.999)},
    "ema, one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.999)},
    "swa": {},
    "swa, buffers": {"use_buffers": True},
}


def averages_of(model, options, updates=200):
    """The average of weights that stay one unit away from where it began, in the dtype of the model."""
    averaged = AveragedModel(model, **options)
    averaged.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for _ in range(updates):
        averaged.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1)
    return torch.cat([p.detach().float().flatten() for p in averaged.module.parameters()])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_average_moves_as_in_fp32(name):
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    expected = averages_of(copy.deepcopy(model), FUNCTIONS[name])
    model.bfloat16()
    plain = averages_of(model, FUNCTIONS[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hmpx.attach(optimizer)
    found = averages_of(model, FUNCTIONS[name])
    again = averages_of(model, FUNCTIONS[name])
    other = averages_of(copy.deepcopy(model), FUNCTIONS[name])  # no optimizer of it is attached
    hmpx.detach(optimizer)
    with hmpx.convert():
        converted = averages_of(model, FUNCTIONS[name])
    with hmpx.activate("neuron-bf16-sr"):
        under_recipe = averages_of(model, FUNCTIONS[name])
    assert torch.equal(found, again) and torch.equal(found, under_recipe)  # no generator of torch's
    assert torch.equal(plain, other) and torch.equal(plain, converted)
    assert abs(found.mean() - expected.mean()) < 0.01 * (expected.mean() - 1)
    if "ema" in name:
        assert plain.mean() == 1  # it never moves


def test_one_update_is_rounded_to_a_neighbour():
    model = nn.Linear(8, 8).bfloat16()
    with hmpx.activate("neuron-bf16-sr"):
        averaged = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        averaged.update_parameters(model)
        other = nn.Linear(8, 8).bfloat16()
        averaged.update_parameters(other)
    for p, old, new in zip(averaged.module.parameters(), model.parameters(), other.parameters(), strict=True):
        exact = old.detach().double() * 0.9 + new.detach().double() * 0.1
        assert ((p.detach().double() - exact).abs() <= exact.abs() * 2**-7 + 1e-9).all()
