"""In which dtype an op runs: each situation under each setting, in eager code."""

import contextlib

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import hmpx

X = torch.randn(4, 4)
DTYPES = {"b": torch.bfloat16, "h": torch.float16, "f": torch.float32}
SETTINGS = {
    "model": {"where": "model"},
    "model, FP16": {"where": "model", "low_precision": "float16"},
    "everywhere": {"where": "everywhere"},
    "off": {"where": "model", "enabled": False},
}


def product(x):
    return x @ x


class Model(nn.Module):
    """A forward is what `body` makes of the input."""

    def __init__(self, body=product):
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(4)), body

    def forward(self, x):
        return self.body(x)


class Metric(nn.Module):
    def forward(self, x):
        return x @ x


class Around(nn.Module):
    """Calls a module inside of a region of its own."""

    def __init__(self, region, inner):
        super().__init__()
        self.region, self.inner = region, inner

    def forward(self, x):
        with self.region():
            return self.inner(x)


def within(region, function):
    def run(x):
        with region():
            return function(x)

    return run


def island():
    return torch.autocast("cpu", enabled=False)


def opened():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def listed():
    return hmpx.casts(fp32=["matmul"])


def low():
    return hmpx.casts(bf16=["matmul"])


MODEL, METRIC, RULED = Model(), Metric(), Model()
RULED_LOW, IN_RULED = Model(within(island, product)), Model()
AROUND_RULED = Around(contextlib.nullcontext, IN_RULED)
SITUATIONS = {  # what runs; the dtype under each setting, in their order
    "in no module": (product, "ffbf"),
    "with a gradient": (lambda x: product(x * MODEL.weight), "bhbf"),
    "without one": (within(torch.no_grad, lambda x: product(x * MODEL.weight)), "ffbf"),
    "in a model": (MODEL, "bhbf"),
    "in a model without gradients": (within(torch.no_grad, MODEL), "bhbf"),
    "its forward by hand": (lambda x: MODEL.forward(x), "bhbf"),
    "with other parameters": (lambda x: functional_call(MODEL, {"weight": x[0]}, (x,)), "bhbf"),
    "what is computed again": (lambda x: checkpoint(MODEL, x, use_reentrant=False), "bhbf"),
    "in a module without parameters": (METRIC, "ffbf"),
    "as a part of a model": (Model(METRIC), "bhbf"),
    "on an island": (Model(within(island, product)), "ffff"),
    "on an island by a decorator": (Model(torch.autocast("cpu", enabled=False)(product)), "ffff"),
    "on an island of FP32": (Model(within(lambda: torch.autocast("cpu", dtype=torch.float32), product)), "ffff"),
    "opened again on it": (Model(within(island, within(opened, product))), "bhbb"),  # off, torch's own lists cast
    "an island in that": (Model(within(island, within(opened, within(island, product)))), "ffff"),
    "in a script's own region": (within(island, MODEL), "bhbf"),
    "a script's own region alone": (within(island, product), "ffff"),
    "disabled": (within(hmpx.disable_casts, MODEL), "ffff"),
    "enabled": (within(hmpx.enable_casts, product), "bhbb"),
    "enabled in disabled": (within(hmpx.disable_casts, within(hmpx.enable_casts, product)), "bhbb"),
    "disabled in enabled": (within(hmpx.enable_casts, within(hmpx.disable_casts, product)), "ffff"),
    "disabled inside of a forward": (Model(within(hmpx.disable_casts, product)), "ffff"),
    "enabled on an island": (Model(within(island, within(hmpx.enable_casts, product))), "bhbb"),
    "in a region with lists": (within(listed, MODEL), "ffff"),
    "with lists for low precision": (within(low, product), "bhbb"),
    "with those in disabled": (within(hmpx.disable_casts, within(low, product)), "bhbb"),
    "the innermost lists": (within(low, within(listed, product)), "ffff"),
    "lists that do not name it": (within(lambda: hmpx.casts(fp32=["exp"]), MODEL), "bhbb"),
    "in a cache of weights": (within(hmpx.cached_weights, MODEL), "bhbf"),
    "a decorator": (hmpx.disable_casts(MODEL.forward), "ffff"),
    "a decorator without parentheses": (hmpx.disable_casts(product), "ffff"),
    "a rule of the module": (RULED, "ffff"),
    "a rule for low precision on its island": (RULED_LOW, "bhbf"),
    "a rule of the module inside": (AROUND_RULED, "ffff"),
}


@pytest.fixture
def rules():
    given = [
        hmpx.policy_for(RULED, fp32=["matmul"]),
        hmpx.policy_for(RULED_LOW, bf16=["matmul"]),
        hmpx.policy_for(AROUND_RULED, bf16=["matmul"]),
        hmpx.policy_for(IN_RULED, fp32=["matmul"]),
    ]
    yield
    for rule in given:
        rule.remove()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_a_product_runs_in_the_dtype_of_its_situation(setting, rules):
    """With the bits of the product by hand in that dtype."""
    column = [*SETTINGS].index(setting)
    with hmpx.convert(bf16=["matmul"], fp32=[], promote=[], kernels="native", **SETTINGS[setting]):
        found = {name: run(X).detach() for name, (run, _) in SITUATIONS.items()}
    expected = {name: DTYPES[letters[column]] for name, (_, letters) in SITUATIONS.items()}
    assert {name: each.dtype for name, each in found.items()} == expected
    for name, each in found.items():
        assert torch.equal(each, X.to(each.dtype) @ X.to(each.dtype)), name
