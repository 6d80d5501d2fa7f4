"""Who computes a step where nobody says `fused`: hmpx or the optimizer, as its class and its options say."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.footprint import footprint
from hmpx.updates.holding.settings import Settings
from hmpx.updates.stepping.optimizer_classes import formula_of
from tests.support.formulas import CONFIGURATIONS

BF16 = torch.bfloat16


class Own(optim.AdamW):
    """Nobody knows what a subclass does."""


OTHERS = {
    "a subclass": (Own, {}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "Adafactor": (optim.Adafactor, {}),
    "amsgrad": (optim.AdamW, {"amsgrad": True}),
    "differentiable": (optim.SGD, {"differentiable": True}),
}


def trained(cls, options, steps=4, seed=0, attach=None, region=False, load=None):
    """Weights and state after some steps, on sizes at which the last bits of FP32 differ."""
    generator = torch.Generator().manual_seed(seed)
    named = [
        (f"p{i}", nn.Parameter(torch.randn(s, generator=generator).bfloat16())) for i, s in enumerate(((63, 50), (9,)))
    ]
    optimizer = cls(named, **{"lr": 1e-2, **options})
    if attach is not None:
        hmpx.attach(optimizer, **attach)
    if load is not None:
        optimizer.load_state_dict(load)
    for _ in range(steps):
        for _, p in named:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        with hmpx.disable_casts() if region else contextlib.nullcontext():
            optimizer.step()
    state = [v for _, p in named for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return optimizer, [*(p.detach() for _, p in named), *state]


def same(one, other):
    return len(one[1]) == len(other[1]) and all(map(torch.equal, one[1], other[1]))


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_hmpx_steps_a_class_that_it_has_a_formula_for(name):
    case = CONFIGURATIONS[name]
    expected = trained(*case, attach={"fused": True})
    assert same(trained(*case, attach={}), expected) and same(trained(*case, region=True), expected)
    own = trained(*case, attach={"fused": False})
    assert name in ("SGD", "SGD maximize", "Adagrad") or not same(own, expected)  # some last bit differs
    assert all(
        torch.allclose(a.float(), b.float(), rtol=2**-6, atol=1e-5) for a, b in zip(own[1], expected[1], strict=True)
    )


@pytest.mark.parametrize("name", OTHERS)
def test_others_step_by_their_own_code(name):
    case = OTHERS[name]
    expected = trained(*case, attach={"fused": False})
    assert same(trained(*case, attach={}), expected) and same(trained(*case, region=True), expected)


def test_groups_choose_for_themselves():
    p, amsgrad = (nn.Parameter(torch.ones(70, dtype=BF16)) for _ in range(2))
    optimizer = optim.AdamW([{"params": [p]}, {"params": [amsgrad], "amsgrad": True}], lr=1e-2)
    hmpx.attach(optimizer)
    p.grad, amsgrad.grad = torch.ones_like(p), torch.ones_like(p)
    optimizer.step()
    assert "max_exp_avg_sq" in optimizer.state[amsgrad] and "max_exp_avg_sq" not in optimizer.state[p]


def test_a_recipe_says_nothing_and_may_say_false():
    assert hmpx.Recipe().fused is None and hmpx.Recipe(fused=False).settings().fused is False
    with pytest.raises(hmpx.HmpxError, match="fused is 1, "):
        hmpx.Recipe(fused=1)


def test_a_checkpoint_of_before_says_which_key_gives_its_bits(caplog):
    """One sentence, at the first step, attached before the load or after it, and in a region."""
    case = CONFIGURATIONS["AdamW"]
    optimizer, _ = trained(*case, attach={"fused": False})
    saved = optimizer.state_dict()
    caplog.clear()
    trained(*case, attach={}, load=saved)
    assert not caplog.messages
    del saved["param_groups"][0]["hmpx_version"]
    for how in ({"attach": {}}, {"region": True}):
        caplog.clear()
        trained(*case, **how, load=saved)
        told = [message for message in caplog.messages if "is of hmpx 0.2 or before" in message]
        assert len(told) == 1 and "fused=False" in told[0]
    caplog.clear()
    resumed, other = trained(*case, attach={"fused": False}, load=saved), trained(optim.Adamax, {}, attach={})
    assert not caplog.messages and formula_of(resumed[0]) and not formula_of(other[0])


def test_gradients_that_are_released_after_a_checkpoint_of_before_say_so_too(caplog):
    model = nn.Linear(4, 4).bfloat16()
    optimizer = optim.AdamW(model.named_parameters())
    hmpx.attach(optimizer, release_gradients=True)
    for _ in range(3):
        model(torch.ones(1, 4).bfloat16()).float().sum().backward()
        optimizer.step()
        assert not caplog.messages
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["hmpx_version"]
    optimizer.load_state_dict(saved)
    for _ in range(2):
        model(torch.ones(1, 4).bfloat16()).float().sum().backward()
        optimizer.step()
    (told,) = caplog.messages
    assert "is of hmpx 0.2 or before" in told and "fused=False" in told


def test_explain_and_footprint_say_who_chose(capsys):
    said = {}
    for fused in (None, True, False):
        hmpx.explain({"fused": fused})
        (said[fused],) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("steps "))
        found = footprint(Settings(fused=fused), BF16)
        assert f"fused={fused}" in found.stepped_by and (found.slice > 0) == (fused is False)
    assert "kernels for Adagrad, Adam, AdamW" in said[None] and "(fused is not set)" in said[None]
    assert "amsgrad" in said[None] and "(fused: true)" in said[True]
    assert said[False].endswith("by the optimizer's own code, with its bits (fused: false)")
    hmpx.explain({"parameter_dtype": "float32"})
    assert not any(line.startswith("steps ") for line in capsys.readouterr().out.splitlines())
