"""Who computes a step where nobody says `fused`: hmpx or the optimizer, as its class and its options say."""

import contextlib
import functools
import importlib
import types

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.recipes.recipe import footprint
from hmpx.updates.holding.stores import Settings
from hmpx.updates.stepping.optimizer_classes import SCOPES, formula_of
from tests.support.formulas import CONFIGURATIONS
from tests.support.same import same

BF16 = torch.bfloat16


class Own(optim.AdamW):
    """Nobody knows what a subclass does."""


OTHERS = {
    "a subclass": (Own, {}),
    **{
        cls.__name__: (cls, {})
        for cls in SCOPES
        if cls not in {optim.Muon, *(known for known, _ in CONFIGURATIONS.values())}
    },
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


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_hmpx_steps_a_class_that_it_has_a_formula_for(name):
    case = CONFIGURATIONS[name]
    expected = trained(*case, attach={"fused": True})[1]
    assert same(trained(*case, attach={})[1], expected) and same(trained(*case, region=True)[1], expected)
    own = trained(*case, attach={"fused": False})[1]
    assert name in ("SGD", "SGD maximize", "Adagrad") or not same(own, expected)  # some last bit differs
    wide = ([each.float() for each in found] for found in (own, expected))
    torch.testing.assert_close(*wide, rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_others_step_by_their_own_code(name):
    case = OTHERS[name]
    expected = trained(*case, attach={"fused": False})[1]
    assert same(trained(*case, attach={})[1], expected) and same(trained(*case, region=True)[1], expected)


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
    resumed, other = trained(*case, attach={"fused": False}, load=saved), trained(Own, {}, attach={})
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
        assert f"fused={fused}" in found.stepped_by and (found.copies > 0) == (fused is False)
    assert "kernels for Adagrad, Adam, AdamW" in said[None] and "(fused is not set)" in said[None]
    assert "amsgrad" in said[None] and "(fused: true)" in said[True]
    assert (
        "with its bits, in FP32 copies of the largest parameter or more; of all parameters at once where" in said[False]
    )
    hmpx.explain({"parameter_dtype": "float32"})
    assert not any(line.startswith("steps ") for line in capsys.readouterr().out.splitlines())


adam = importlib.import_module("torch.optim.adam")
OWN, FUNCTION = optim.AdamW.step, adam.adam


def clipping(self, *args, **kwargs):
    """Around the step of the class: clips gradients, and moves weights by less than BF16 holds."""
    for p in self.param_groups[0]["params"]:
        p.grad.clamp_(-0.5, 0.5)
        p.data.add_(p.grad.sign(), alpha=-1e-5)
    return OWN(self, *args, **kwargs)


@torch.no_grad()
def of_another_kind(self, closure=None):
    for p in self.param_groups[0]["params"]:
        p.add_(p.grad.sign(), alpha=-self.param_groups[0]["lr"] / 8)


def _of_the_class(step):
    return lambda optimizer: setattr(optim.AdamW, "step", step)


def _of_the_object(step):
    return lambda optimizer: setattr(optimizer, "step", step(optimizer))


def _function_behind(optimizer):
    adam.adam = lambda params, grads, *args, **kwargs: FUNCTION(params, [g / 8 for g in grads], *args, **kwargs)


REPLACED = {
    "the class's": _of_the_class(clipping),
    "the class's, decorated": lambda optimizer: setattr(optim.AdamW, "step", functools.wraps(OWN)(clipping)),
    "by one of another kind": _of_the_class(of_another_kind),
    "the function behind it": _function_behind,
    "the object's": _of_the_object(lambda optimizer: types.MethodType(clipping, optimizer)),
    "the object's, by a function": _of_the_object(lambda optimizer: lambda: of_another_kind(optimizer)),
}


@pytest.mark.parametrize("when", ["before attach", "after it"])
@pytest.mark.parametrize("what", REPLACED)
def test_a_step_that_somebody_has_replaced_runs(what, when):
    """Beside an FP32 twin that steps alike and is rounded in the same way."""
    found = []
    optim.AdamW([nn.Parameter(torch.ones(1))])  # torch has wrapped the step, and has marked it
    for dtype in (torch.float32, BF16):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(torch.randn(40, 30, generator=generator).bfloat16().to(dtype))
        optimizer = optim.AdamW([("p", p)], lr=1e-2)
        scheduler = None if "object" in what else optim.lr_scheduler.StepLR(optimizer, 2)
        try:
            for place in ("before attach", "after it"):
                if when == place:
                    REPLACED[what](optimizer)
                if place == "before attach" and dtype is BF16:
                    hmpx.attach(optimizer)
            for step in range(4):
                optimizer.zero_grad()
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(dtype)
                optimizer.step()
                if dtype is torch.float32:
                    with torch.no_grad():
                        p.copy_(hmpx.stochastic_round(p, seed=0, step=step, name="p"))
                if scheduler is not None:
                    scheduler.step()
            if dtype is BF16:
                hmpx.detach(optimizer)
        finally:
            optim.AdamW.step, adam.adam = OWN, FUNCTION
        found.append(p.detach().float())
    assert torch.equal(*found)


def test_a_class_made_by_a_decorator_is_stepped_as_a_whole():
    """`functools.wraps` copies the mark by which torch tells that it has wrapped a step."""
    optim.AdamW([nn.Parameter(torch.ones(1))])

    class Decorated(optim.AdamW):
        @functools.wraps(optim.AdamW.step)
        def step(self, *args, **kwargs):
            return clipping(self, *args, **kwargs)

    class Plain(optim.AdamW):
        def step(self, *args, **kwargs):
            return clipping(self, *args, **kwargs)

    for region in (False, True):
        attach = None if region else {}
        assert same(*(trained(cls, {}, attach=attach, region=region)[1] for cls in (Plain, Decorated)))


def test_what_needs_a_known_step_is_refused_where_it_is_replaced(monkeypatch):
    monkeypatch.setattr(optim.AdamW, "step", clipping)
    for setting in ("fused", "release_gradients"):
        optimizer = optim.AdamW([nn.Parameter(torch.ones(3, dtype=BF16))])
        with pytest.raises(hmpx.HmpxError, match="AdamW, whose step somebody has replaced"):
            hmpx.attach(optimizer, **{setting: True})
