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
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(1)
    for _ in range(updates):
        averaged.update_parameters(moved)
    return torch.cat([p.detach().float().flatten() for p in averaged.module.parameters()])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_average_moves_as_in_fp32(name):
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    expected = averages_of(copy.deepcopy(model), FUNCTIONS[name])
    model.bfloat16()
    with hmpx.convert():
        found = averages_of(model, FUNCTIONS[name])
        again = averages_of(model, FUNCTIONS[name])
    assert torch.equal(found, again)  # no generator of torch's
    assert abs(found.mean() - expected.mean()) < 0.01 * (expected.mean() - 1)
    if "ema" in name:
        assert averages_of(model, FUNCTIONS[name]).mean() == 1  # plain torch: it never moves


def test_one_update_is_rounded_to_a_neighbour():
    model = nn.Linear(8, 8).bfloat16()
    with hmpx.convert():
        averaged = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        averaged.update_parameters(model)
        other = nn.Linear(8, 8).bfloat16()
        averaged.update_parameters(other)
    for p, old, new in zip(averaged.module.parameters(), model.parameters(), other.parameters(), strict=True):
        exact = old.detach().double() * 0.9 + new.detach().double() * 0.1
        assert ((p.detach().double() - exact).abs() <= exact.abs() * 2**-7 + 1e-9).all()
