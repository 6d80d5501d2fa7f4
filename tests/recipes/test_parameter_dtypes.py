"""Parameters that stay in the dtype in which they come, and are named."""

import contextlib
import copy
import functools
import gc
import re
import weakref

import pytest
import torch
import yaml
from torch import nn

import hmpx
from hmpx.base import process_state

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class Routed(nn.Module):
    """As transformers' classes name their routers; diffusers' have the key without `_strict`."""

    _keep_in_fp32_modules_strict = ("gate.weight",)

    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.gateway = nn.Linear(4, 2, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)


class Weakly(Routed):
    _keep_in_fp32_modules_strict = None
    _keep_in_fp32_modules = ("gate",)


def dtypes(model, recipe):
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    hmpx.prepare(model, optimizer, recipe)
    found = {name: p.dtype for name, p in model.named_parameters()}
    hmpx.restore(optimizer)
    return found


def beside_low(cls=Routed):
    model = cls()
    model.experts.bfloat16()
    return model


def test_fp32_beside_bf16_and_what_a_class_names_stay_and_are_named(caplog):
    diffusers = type("Diffusers", (Weakly,), {"__module__": "diffusers.models.some"})
    in_bf16 = dict.fromkeys(["gate.weight", "experts.weight", "experts.bias", "gateway.weight", "gateway.bias"], BF16)
    every = dict.fromkeys(("gate.weight", "gateway.weight", "gateway.bias"), FP32)
    cases = {
        "beside BF16": (beside_low(), {}, every),
        "beside BF16, of no class": (beside_low(Weakly), {}, every),
        "named by its class": (Routed(), {}, {"gate.weight": FP32}),
        "named by a module's class": (nn.Sequential(Routed())[0], {}, {"gate.weight": FP32}),
        "named by transformers for FP16": (Weakly(), {}, {}),
        "named by diffusers": (diffusers(), {}, {"gate.weight": FP32}),
        "a key casts it": (beside_low(), {"parameters": {"gate*": "bfloat16"}}, {}),
        "frozen": (beside_low().requires_grad_(False), {}, every),
        "FP32 weights": (beside_low(), {"parameter_dtype": "float32"}, dict.fromkeys(in_bf16, FP32)),
    }
    for name, (model, keys, kept) in cases.items():
        caplog.clear()
        found = dtypes(model, {"extends": "bf16-sr", **keys})
        assert found == in_bf16 | kept, name
        said = [each.getMessage() for each in caplog.records if "stay in float32" in each.getMessage()]
        assert len(said) == bool(kept and not keys) and all("'gate.weight'" in each for each in said), name


def test_fp64_stays_under_a_recipe_of_fp32_weights_and_is_named_under_others(caplog):
    def orbit():
        return nn.ModuleDict({"mass": nn.Linear(1, 1).double(), "net": nn.Linear(1, 1)})

    for recipe, dtype in (("autocast-cpu", FP64), ("hmp-o1", FP64), ("bf16-sr", BF16), ("xla-downcast-bf16", FP32)):
        caplog.clear()
        found = dtypes(orbit(), recipe)
        assert found["mass.weight"] is found["mass.bias"] is dtype, recipe
        said = [each.getMessage() for each in caplog.records if "came in float64" in each.getMessage()]
        assert len(said) == (dtype is not FP64) and all("'mass.weight', 'mass.bias'" in each for each in said), recipe
        assert all(("float32}` in the recipe keeps more" in each) == (dtype is BF16) for each in said), recipe
    found = dtypes(orbit(), {"extends": "autocast-cpu", "parameters": {"mass.*": "float32"}})
    assert {*found.values()} == {FP32}


class Twin(nn.Module):
    """A frozen copy that the model itself averages, as in MoCo, beside frozen weights that nobody writes to."""

    def __init__(self, follow):
        super().__init__()
        torch.manual_seed(0)
        self.online, self.follow = nn.Linear(8, 8), follow
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.base = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for k, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
                self.follow(k, q)
        return self.online(x) - 2 * self.target(self.base(x)).detach()


def replaced(k, q):
    k.data = k.data * 0.999 + q.data * 0.001


def in_place(k, q):
    k.mul_(0.999).add_(q, alpha=0.001)


def test_a_frozen_model_that_is_looked_at_may_go():
    def prepared():
        model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8))
        hmpx.prepare(model, torch.optim.SGD(model[1].parameters(), lr=0.1), "bf16-sr")
        return weakref.ref(model[0].weight)

    weight = prepared()
    gc.collect()
    assert process_state.first_steps and weight() is None
    for look in list(process_state.first_steps):
        look()
    hmpx.restore()


@pytest.mark.parametrize("follow", [replaced, in_place, lambda k, q: None])
def test_an_average_that_a_recipe_has_frozen_in_bf16_is_named_with_the_rule_that_keeps_it(follow, caplog):
    def way(recipe):
        """Return where the average goes in 30 steps."""
        model, x = Twin(follow), torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        start = model.target.weight.double()
        with recipe() if recipe else contextlib.nullcontext():
            optimizer = torch.optim.SGD(model.online.parameters(), lr=0.05)
            for _ in range(30):
                optimizer.zero_grad()
                model(x).float().square().mean().backward()
                optimizer.step()
        return model.target.weight.double() - start

    in_fp32 = way(None)
    in_bf16 = way(lambda: hmpx.activate("bf16-sr"))
    said = [each.getMessage() for each in caplog.records if "an average" in each.getMessage()]
    assert len(said) == (follow in (replaced, in_place)) and not process_state.first_steps
    for each in said:
        assert "parameters 'target.weight', 'target.bias' were frozen" in each and "'base" not in each
        recipe = {"extends": "bf16-sr", **yaml.safe_load(re.search("`(.*)`", each)[1])}
        mended = way(functools.partial(hmpx.activate, recipe))
        lost, kept = ((each * in_fp32).sum() / in_fp32.square().sum() for each in (in_bf16, mended))
        assert lost < 0.5 and 0.8 < kept < 1.2
