"""Parameters that stay in the dtype in which they come, and are named."""

from __future__ import annotations

import torch
from torch import nn

import hmpx

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
        "a key casts it": (beside_low(), {"module_dtypes": {"gate*": "bfloat16"}}, {}),
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
    found = dtypes(orbit(), {"extends": "autocast-cpu", "module_dtypes": {"mass": "float32"}})
    assert {*found.values()} == {FP32}
