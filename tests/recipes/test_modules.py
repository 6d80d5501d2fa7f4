"""The key `modules` of a recipe: rules for parts of a model, by pattern."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
import yaml
from torch import nn

import hmpx
from hmpx.conversion import installed
from hmpx.recipes.activate import activate_for, recipe_of_trainer
from hmpx.recipes.reading import as_recipe

BF16, FP32 = torch.bfloat16, torch.float32
X = torch.randn(4, 4)


class Product(nn.Module):
    def forward(self, x):
        return x @ x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Product(), Product())
        self.layers = nn.ModuleList([Product(), Product()])
        self.again = self.layers[0]
        self.lm_head = nn.Linear(4, 4)

    def forward(self, x):
        dtypes = [module(x).dtype for module in (*self.encoder, *self.layers, self.again)]
        return [self.encoder(x).dtype, *dtypes, self.lm_head(x).dtype]


@pytest.fixture
def prepared(tmp_path):
    """Prepare a model by the lines of a recipe, and return it."""

    def prepare(text, model=None):
        model = model or Net()
        path = tmp_path / "mine.yaml"
        path.write_text("parameter_dtype: float32\nmodules:\n" + text)
        hmpx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), path)
        return model

    yield prepare
    hmpx.restore()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("  encoder: fp32", "f b b b b b b"),  # of the encoder's own call; its parts are called alone after that
        ("  encoder.*: fp32", "f f f b b b b"),
        ("  layers: {fp32: [matmul]}", "b b b f f f b"),
        ("  layers.0: fp32", "b b b f b f b"),
        ("  again: fp32", "b b b f b f b"),
        ("  '*': fp32", "f f f f f f f"),
        ("  '': fp32", "f f f f f f f"),
        ("  '*': fp32\n  lm_head: {bf16: [linear]}", "f f f f f f b"),
        ("  lm_head: {bf16: [linear]}\n  '*': fp32", "f f f f f f f"),  # of two patterns for a module the last
        ("  '': fp32\n  layers: {bf16: [matmul]}\n  layers.1: {fp32: [matmul]}", "f f f b f b f"),
        ("  '': {bf16: [], fp32: [matmul, linear]}", "f f f f f f f"),
        ("  lm_head: {low_precision: fp16}", "b b b b b b h"),
    ],
)
def test_the_innermost_decides_and_of_two_patterns_the_last(prepared, text, inside):
    model = prepared(text)
    assert " ".join(str(dtype).removeprefix("torch.")[0] for dtype in model(X)) == inside.replace("h", "f")
    assert ("h" in inside) == (model.lm_head(X).dtype is torch.float16)
    hmpx.restore()
    assert set(model(X)) == {FP32} and "_hmpx_rules" not in vars(model.lm_head)


def test_a_pattern_may_fit_modules_that_are_never_called_beside_one_that_is(prepared):
    attention = nn.Sequential(nn.MultiheadAttention(4, 1))
    for text in ("  '*': fp32", "  '0*': fp32"):
        assert prepared(text, attention)[0](X, X, X)[0].dtype is FP32
        hmpx.restore()
    with pytest.raises(hmpx.HmpxError, match=r"modules: '\*.out_proj': .*its forward is never called"):
        prepared("  '*.out_proj': fp32", attention)


class Around(nn.Module):
    def __init__(self, product=False):
        super().__init__()
        self.a, self.product = nn.Linear(4, 4), product

    def forward(self, x):
        return self.a(x @ x if self.product else x)


@pytest.mark.parametrize(
    ("text", "unmatched"),
    [
        ("  '*': fp32\n  '0': bf16", "every op that was called in it was in a module or region with a rule of its own"),
        ("  '*': {fp32: [linear]}\n  '0': {bf16: [linear]}", "linear"),
    ],
)
def test_a_pattern_that_an_earlier_one_leaves_nothing_to_is_said_and_rounds_nothing(prepared, caplog, text, unmatched):
    model = nn.Sequential(Around(), Around())
    expected = model(X)
    prepared(text, model)
    with hmpx.record() as log:
        assert torch.equal(model(X), expected)
    (said,) = [record.message for record in caplog.records if "'0'" in record.message]
    assert said.startswith("modules: '0' decides the ops in the forward of Around itself and none in the modules insid")
    assert "each has a rule of its own from '*', and the innermost decides" in said
    assert len(log.unmatched) == 1 and log.unmatched[0].endswith(f"modules '0': {unmatched}")


def test_no_word_of_patterns_that_decide_something(prepared, caplog):
    for text in (
        "  '': fp32\n  '0': bf16",
        "  '0': bf16\n  '*': fp32",
        "  '*': fp32\n  '0.a': bf16",
        "  '0': bf16\n  '0.a': fp32",
        "  '*': {fp32: [softmax]}\n  '0': bf16",
    ):
        prepared(text, nn.Sequential(Around(), Around()))
        assert not [record.message for record in caplog.records if "'0'" in record.message], text


def test_a_hidden_pattern_decides_the_ops_of_its_own_forward(prepared):
    model = prepared("  '*': fp32\n  '0': bf16", nn.Sequential(Around(product=True), Around()))
    with hmpx.record() as log:
        model(X)
    assert {site.op: site.rule for site in log.sites if site.module in ("0", "1")}["matmul"] == "bf16"
    assert not log.unmatched


def test_models_that_are_prepared_one_after_the_other_keep_their_rules(prepared):
    first = prepared("  lm_head: fp32")
    second = prepared("  layers.1: fp32")
    assert first(X)[-1] is FP32 and second(X)[-1] is BF16 and second(X)[4] is FP32
    prepared("  layers.0: fp32", first)
    assert first(X)[-1] is BF16 and first(X)[3] is FP32 and second(X)[4] is FP32


def test_a_model_that_is_made_after_activate_has_its_rules_when_its_optimizer_is_made():
    recipe = {"parameter_dtype": "float32", "modules": {"lm_head": "fp32"}}
    with hmpx.activate(recipe):
        model = Net()
        assert model(X)[-1] is BF16
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
        assert model(X)[-1] is FP32 and len(optimizers) == 2
        with hmpx.convert(), hmpx.enable_casts():
            assert model(X)[-1] is BF16
        assert model(X)[-1] is FP32
    assert "_hmpx_rules" not in vars(model.lm_head)


def test_a_trainers_plugin_has_the_rules_too():
    """Lightning and transformers hand the model over first, perhaps several times."""
    recipe = recipe_of_trainer({"parameter_dtype": "float32", "modules": {"lm_head": "fp32"}})
    with contextlib.ExitStack() as undo:
        activation, model = activate_for("HmpxCallback", recipe, undo), Net()
        for _ in range(2):
            activation.take_model(model, undo)
            assert model(X)[-2:] == [BF16, FP32] and len(installed().rules) == 1
    assert "_hmpx_rules" not in vars(model.lm_head) and installed() is None


def test_a_printed_recipe_says_the_same():
    recipe = hmpx.Recipe(modules={"a": torch.float32, "*.b": {"fp32": ("linear",)}, "c": {"bf16": ("mm",)}})
    read = as_recipe(yaml.safe_load(str(recipe)))
    assert list(read.overlays()) == ["a", "*.b", "c"]
    for name, overlay in read.overlays().items():
        assert overlay.over(hmpx.Policy()) == recipe.overlays()[name].over(hmpx.Policy())


class Compiled(nn.Module):
    """As e3nn's tensor products: what computes is scripted, and is handed the module's own weight."""

    def __init__(self, part):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        if isinstance(part, nn.Module):
            self.inside = nn.ModuleList([torch.jit.script(part)])
        else:
            self.product = torch.jit.script(part)

    def forward(self, x):
        return self.inside[0](x, self.weight) if hasattr(self, "inside") else self.product(x, self.weight)


class Multiplies(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.eye(4))

    def forward(self, x, weight):
        return torch.mm(torch.mm(x, weight), self.constant)


def _product(x, weight):
    return torch.mm(torch.mm(x, weight), torch.eye(4))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(("part", "active"), [(Multiplies(), False), (_product, True)])
def test_scripted_code_is_named_and_the_rules_that_are_named_keep_it_in_fp32(part, active, caplog):
    def train(recipe, active=False):
        caplog.clear()
        with hmpx.activate(recipe) if active else contextlib.nullcontext():
            model = nn.Sequential(nn.Linear(4, 4), Compiled(part), nn.Linear(4, 4), Compiled(part))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if not active:
                hmpx.prepare(model, optimizer, recipe)
            try:
                return model(X).dtype
            finally:
                hmpx.restore()

    cure: dict = {}
    for keys in ({}, {"modules": ...}, {"parameters": ...}):
        with pytest.raises(RuntimeError, match="TorchScript"):
            train({"extends": "bf16-sr", **{key: cure[key] for key in keys}}, active)
        name = "1.inside.0" if isinstance(part, nn.Module) else "1"
        assert f"'{name}', '{name.replace('1', '3')}': scripted code" in caplog.text and len(caplog.messages) == 1
        cure = {
            key: value for each in re.findall("`(.*?)`", caplog.text) for key, value in yaml.safe_load(each).items()
        }
        assert cure == {
            "modules": {"1": "float32", "3": "float32"},
            "parameters": {"1.*": "float32", "3.*": "float32"},
        }, keys
    assert train({"extends": "bf16-sr", **cure}, active) is FP32 and not caplog.text
    assert train({"extends": "bf16-sr", "opt_level": None, "parameter_dtype": "float32"}) is FP32 and not caplog.text
    assert train({"extends": "autocast-cpu", "modules": cure["modules"]}) is FP32 and not caplog.text


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_code_in_layers_is_named_by_one_pattern_and_a_scripted_model_too(prepared, caplog):
    layers = nn.ModuleList([Compiled(_product) for _ in range(12)])
    model = nn.Sequential(nn.ModuleDict({"blocks": layers}), nn.Linear(4, 4))
    hmpx.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-sr")
    assert (
        "'0.blocks.0', '0.blocks.1' and 10 more: " in caplog.text
        and "`modules: {'*.blocks.*': float32}`" in caplog.text
    )
    caplog.clear()
    whole = torch.jit.script(nn.Linear(4, 4))
    hmpx.prepare(whole, torch.optim.SGD(whole.parameters(), lr=0.1), "bf16-sr")
    assert "the model itself: scripted code" in caplog.text and "called in a module of its own" in caplog.text
