"""`AveragedModel` of BF16 weights, beside the same of FP32 copies of them."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel

import hmpx
from tests.support import ranks

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


def test_the_average_of_a_wrapped_model_has_the_bits_of_the_models():
    """DDP puts "module." before the names that the rounding numbers go by, and other wrappers their own."""
    model = nn.Linear(64, 64).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hmpx.attach(optimizer)
    wrapped = nn.Module()
    wrapped.module = model
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(1.0)
    assert torch.equal(averages_of(wrapped, FUNCTIONS["ema"]), averages_of(model, FUNCTIONS["ema"]))


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


def averages_of_shards(rank, world):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Linear(48, 7).bfloat16()  # whose rows two ranks cannot share equally
    averaged = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
    if world > 1:
        fully_shard(model)
        fully_shard(averaged.module)
    optimizer = torch.optim.AdamW(model.parameters())
    hmpx.attach(optimizer)
    averaged.update_parameters(model)
    before = averaged.module.weight.detach().clone()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    for _ in range(3):
        averaged.update_parameters(model)
    assert not torch.equal(before, averaged.module.weight)
    found = [p.detach() for p in averaged.module.parameters()]
    return [(p.full_tensor() if world > 1 else p).tolist() for p in found]


def test_the_average_of_shards_is_that_of_the_whole_model():
    for found in ranks.run(2, averages_of_shards, 2):
        assert found == averages_of_shards(0, 1)


class OfTheWholeModel:
    """A decay that grows with each call, and an update of one norm for all tensors."""

    def __init__(self):
        self.calls = 0

    def __call__(self, averages, weights, count):
        self.calls += 1
        ways = [weight - average for average, weight in zip(averages, weights, strict=True)]
        norm = torch.stack([way.norm() for way in ways]).norm()
        for average, way in zip(averages, ways, strict=True):
            average.add_(way / norm, alpha=1 / self.calls)


def test_a_function_of_all_tensors_is_called_once_with_all_of_them():
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    expected = averages_of(copy.deepcopy(model), {"multi_avg_fn": OfTheWholeModel()}, 20)
    optimizer = torch.optim.SGD(model.bfloat16().parameters(), lr=0.1)
    hmpx.attach(optimizer)
    found = averages_of(model, {"multi_avg_fn": OfTheWholeModel()}, 20)
    assert abs(found.mean() - expected.mean()) < 0.01 * (expected.mean() - 1)
