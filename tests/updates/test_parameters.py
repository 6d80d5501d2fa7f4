"""Rules for parameters: each is held as an optimizer of its own would hold it, and checkpoints go on with that."""

import copy
import io

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping.optimizer_classes import scope_of
from tests.support.optimizers import UnlistedSGD
from tests.support.same import same

BF16 = torch.bfloat16
SHAPES = {"a.weight": (40, 130), "a.bias": (40,), "b.weight": (7, 5), "b.bias": (7,), "gate": ()}
RULES = {
    "a.*": {"weights": "split", "state_dtype": "8bit"},
    "*.bias": {"weights": "master"},
    "b.weight": {"state_dtype": BF16},
    "gate": {"weights": "nearest"},
}
# What each parameter comes to, by hand: the last rule that fits, and FP32 state where that says nothing.
BY_HAND = {
    "a.weight": {"weights": "split", "state_dtype": "8bit"},
    "a.bias": {"weights": "master"},
    "b.weight": {"weights": "stochastic", "state_dtype": BF16},
    "b.bias": {"weights": "master"},
    "gate": {"weights": "nearest"},
}
MASTERS = {"a.weight", "a.bias", "b.bias"}


def made():
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(BF16)) for name, shape in SHAPES.items()}


def train(params, optimizers, first=0, steps=3):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator).to(BF16)
        for optimizer in optimizers:
            optimizer.step()


def held(params, optimizers):
    """Weights and state, by name."""
    found = {name: p.detach().clone() for name, p in params.items()}
    for name, p in params.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(p, {}).items():
                found[f"{name}.{key}"] = torch.as_tensor(value)
    return found


@pytest.mark.parametrize(
    "make, settings",
    [
        (lambda named: optim.AdamW(named, lr=1e-3), {}),
        (lambda named: optim.AdamW(named, lr=1e-3), {"fused": True}),
        (lambda named: optim.Adafactor(named, lr=1e-3), {}),
        (lambda named: UnlistedSGD(named, lr=1e-3, momentum=0.9), {}),
    ],
    ids=["sliced", "fused", "by parameter", "model"],
)
def test_each_parameter_is_held_as_an_optimizer_of_its_own_would(make, settings):
    params, others = made(), made()
    optimizer = make(list(params.items()))
    handle = hmpx.attach(optimizer, seed=5, parameters=RULES, **settings)
    own = []
    for name, p in others.items():
        own.append(make([(name, p)]))
        hmpx.attach(own[-1], seed=5, **BY_HAND[name], **settings)
    train(params, [optimizer])
    train(others, own)
    assert same(held(params, [optimizer]), held(others, own))
    if scope_of(optimizer) == "element":  # Adafactor's moments are smaller than a parameter
        assert optimizer.state[params["a.weight"]]["hmpx_codes_exp_avg"].dtype is torch.uint8
        assert optimizer.state[params["b.weight"]]["exp_avg"].dtype is BF16
    handle.detach()


@pytest.mark.parametrize("copied", ["loaded", "deepcopy", "pickled"])
def test_a_run_goes_on_as_if_nothing_had_been(copied):
    params = made()
    optimizer = optim.AdamW(list(params.items()), lr=1e-3)
    handle = hmpx.attach(optimizer, parameters=RULES, use_master_weights_in_ckpt=True)
    train(params, [optimizer])
    if copied == "loaded":
        saved, weights = optimizer.state_dict(), {name: p.detach().clone() for name, p in params.items()}
        masters = {i for i, state in saved["state"].items() if "hmpx_master" in state}
        assert {list(SHAPES)[i] for i in masters} == MASTERS
        again = {name: nn.Parameter(weight) for name, weight in weights.items()}
        resumed = optim.AdamW(list(again.items()), lr=1e-3)
        hmpx.attach(resumed, parameters=RULES, use_master_weights_in_ckpt=True)
        resumed.load_state_dict(copy.deepcopy(saved))
    elif copied == "deepcopy":
        again, resumed = copy.deepcopy((params, optimizer))
    else:
        file = io.BytesIO()
        torch.save((params, optimizer), file)
        file.seek(0)
        again, resumed = torch.load(file, weights_only=False)
    train(params, [optimizer], 3)
    train(again, [resumed], 3)
    assert same(held(params, [optimizer]), held(again, [resumed]))
    assert resumed._hmpx_attachment.settings == handle.settings


def test_masters_of_a_checkpoint_go_to_those_that_have_some(caplog):
    params = made()
    optimizer = optim.SGD(list(params.items()), lr=1e-3)
    hmpx.attach(optimizer, "master", use_master_weights_in_ckpt=True)
    train(params, [optimizer])
    saved = optimizer.state_dict()
    hmpx.detach(optimizer)
    handle = hmpx.attach(optimizer, parameters=RULES, use_master_weights_in_ckpt=True)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert "masters of 1 parameters are dropped: weights='stochastic'" in caplog.text  # b.weight
    assert "masters of 1 parameters are dropped: weights='nearest'" in caplog.text  # gate
    index = {name: i for i, name in enumerate(params)}
    after = optimizer.state_dict()["state"]
    for name in MASTERS:
        assert torch.equal(after[index[name]]["hmpx_master"], saved["state"][index[name]]["hmpx_master"])
    assert {name for name, p in params.items() if handle.masters_of(p) is not None} == MASTERS


def test_a_parameter_that_is_not_in_bf16_has_no_masters():
    params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (BF16, torch.float16, torch.float32)]
    handle = hmpx.attach(optimizer := optim.SGD(params), "split")
    assert [handle.masters_of(p) is None for p in params] == [False, True, True]
    hmpx.detach(optimizer)


def test_a_parameter_that_comes_later_gets_its_rule():
    params = made()
    late = {name: params.pop(name) for name in ("b.weight", "b.bias")}
    optimizer = optim.AdamW(list(params.items()))
    hmpx.attach(optimizer, parameters={"a.*": {"state_dtype": "8bit"}, "*.bias": {"state_dtype": BF16}})
    train(params, [optimizer], steps=1)
    optimizer.add_param_group({"params": list(late.items())})
    train({**params, **late}, [optimizer], steps=1)
    assert optimizer.state[late["b.bias"]]["exp_avg"].dtype is BF16
    assert optimizer.state[late["b.weight"]]["exp_avg"].dtype is torch.float32


def test_the_order_of_rules_is_part_of_the_settings():
    optimizer = optim.AdamW(list(made().items()))
    rules = {"a.*": {"weights": "split"}, "*.bias": {"weights": "master"}}
    handle = hmpx.attach(optimizer, parameters=rules)
    assert hmpx.attach(optimizer, parameters=rules) is handle
    with pytest.raises(hmpx.HmpxError, match="is in force"):
        hmpx.attach(optimizer, parameters=dict(reversed(rules.items())))
