"""The names that random numbers are keyed by: where they come from, and that no two are the same."""

import pytest
import torch
from torch import nn, optim

import hmpx
from tests.support.same import same
from tests.support.training import Net, parameter, parameters, step_by, train, weights

BF16 = torch.bfloat16


def test_names_come_from_the_model_a_list_or_the_optimizer():
    results = []
    for source in ("named", "model", "compiled", "list"):
        torch.manual_seed(0)
        model = Net().bfloat16()
        optimizer = optim.SGD(model.named_parameters() if source == "named" else model.parameters(), lr=1e-3)
        given = {"model": {"model": model}, "compiled": {"model": torch.compile(model)}, "named": {}}
        given["list"] = {"names": [name for name, _ in model.named_parameters()]}
        hmpx.attach(optimizer, **given[source])
        train(list(model.named_parameters()), optimizer, 0, 2)
        results.append(weights(model.named_parameters()))
    assert all(same(results[0], others) for others in results[1:])


def test_positions_stand_in_for_names_and_an_empty_name_is_one():
    for names, name in ((None, "1"), (["first", ""], "")):
        p = nn.Parameter(torch.ones(500, dtype=BF16))
        optimizer = optim.SGD([nn.Parameter(torch.ones(1)), p], lr=1e-3)
        if names is not None:
            hmpx.attach(optimizer, names=names)
        with hmpx.disable_casts():
            for _ in range(2):
                p.grad = torch.ones_like(p)
                optimizer.step()
        first = hmpx.stochastic_round(torch.full((500,), 0.999), seed=0, step=0, name=name)
        second = hmpx.stochastic_round(first.float() - 1e-3, seed=0, step=1, name=name)
        assert torch.equal(p, second), names


def test_one_name_for_two_groups_is_refused():
    one, two = parameters()[:1], parameters()[:1]
    optimizer = optim.SGD([{"params": one}, {"params": two}], lr=0.1)
    with pytest.raises(hmpx.HmpxError, match=r"'layer0.weight' is given to parameters 0 and 1"):
        hmpx.attach(optimizer)


def test_no_two_parameters_share_their_random_numbers():
    one, two = parameter(500), parameter(500)
    optimizer = optim.SGD([one], lr=1e-3)
    hmpx.attach(optimizer, names=["1"])
    optimizer.add_param_group({"params": [two], "lr": 1e-3})
    step_by(optimizer)
    assert not torch.equal(one, two)
    groups = [{"params": [("w", parameter(500))]}, {"params": [("w", parameter(500))]}]
    region = optim.SGD(groups, lr=1e-3)
    with hmpx.disable_casts():
        step_by(region)
    assert not torch.equal(*(group["params"][0] for group in region.param_groups))
