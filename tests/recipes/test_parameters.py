"""The recipe key `parameters`: other dtypes and other ways to hold weights and state, by the names of parameters."""

import re

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.recipes.reading import as_recipe, read_recipe

BF16, FP32 = torch.bfloat16, torch.float32
RECIPE = {
    "opt_level": None,
    "state_dtype": "8bit",
    "parameters": {
        "*.bias": {"weights": "master"},
        "1.*": "fp32",
        "0.*": "fp32",
        "0.weight": {"dtype": "bf16", "state_dtype": "bf16"},
    },
}


@pytest.fixture(autouse=True)
def restored():
    yield
    hmpx.restore()


def made():
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def step(model, *optimizers):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()


def kinds(optimizer, p):
    return {str(value.dtype) for value in optimizer.state[p].values() if torch.as_tensor(value).dim()}


def test_the_last_rule_that_fits_decides_dtype_weights_and_state():
    model = made()
    optimizer = optim.AdamW(model.parameters())
    hmpx.prepare(model, optimizer, RECIPE)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert [name for name, dtype in dtypes.items() if dtype is FP32] == ["0.bias", "1.weight", "1.bias"]
    step(model, optimizer)
    assert kinds(optimizer, model[0].weight) == {"torch.bfloat16"}
    assert kinds(optimizer, model[0].bias) == {"torch.float32"}
    assert kinds(optimizer, model[2].weight) == {"torch.uint8", "torch.bfloat16"}
    assert kinds(optimizer, model[2].bias) == {"torch.bfloat16"}  # codes are of two dimensions and more
    held = optimizer._hmpx_attachment._updates.stores.beside
    assert [name for name, p in model.named_parameters() if any(held([p]))] == ["2.bias"]


def test_it_is_the_same_in_a_file_which_prints_as_it_is(tmp_path):
    (tmp_path / "mine.yaml").write_text(str(as_recipe(RECIPE)))
    assert read_recipe(tmp_path / "mine.yaml").settings() == as_recipe(RECIPE).settings()
    assert read_recipe(tmp_path / "mine.yaml").parameters == as_recipe(RECIPE).parameters


def test_bytes_of_a_parameter_by_its_name():
    """By hand, for Adam, with weights, gradients, masters and state; a scale of 2 bytes for 128 elements of state."""
    recipe = as_recipe(RECIPE)
    each = {name: sum(recipe.bytes_per_parameter(name=name).values()) for name in ("0.weight", "0.bias", "1.bias")}
    assert each == {"0.weight": 2 + 2 + 4, "0.bias": 16, "1.bias": 16}
    state = 2 * (1 + 2 / 128)
    assert sum(recipe.bytes_per_parameter().values()) == 4 + state
    assert sum(recipe.bytes_per_parameter(name="2.bias").values()) == 4 + 4 + state


def test_explain_says_what_each_rule_holds(tmp_path, capsys):
    def explained(recipe):
        hmpx.explain(recipe)
        return capsys.readouterr().out

    (tmp_path / "mine.yaml").write_text('opt_level: null\nparameters:\n  "*.bias": {weights: master}\n  "0.*": fp32\n')
    said = explained(tmp_path / "mine.yaml")
    assert "parameters   *.bias: weights master (16 bytes); 0.*: float32 (16 bytes)" in said
    rules = {"*.bias": {"weights": "master"}, "0.*": {"state_dtype": "8bit"}}
    said = explained({"use_master_weights_in_ckpt": True, "parameters": rules})
    assert "0.*: state_dtype 8bit (6.03125 bytes)" in said
    said = explained({"parameter_dtype": "fp32", "state_dtype": "8bit", "parameters": {"0.*": "bf16"}})
    assert "float32; of bfloat16 weights: 8 bits" in said and "as they are held, step number and seed" in said
    said = explained({"parameter_dtype": "fp32", "parameters": {"0.*": "fp32"}})
    assert "checkpoints  as without hmpx" in said
    wanted = "4 bits with a scale for 128 elements, rounded stochastically; bfloat16 of parameters of one dimension"
    assert wanted in explained({"state_dtype": "4bit"})


def test_a_rule_for_another_name_of_a_tied_weight_is_told(caplog):
    model = made()
    model.append(nn.Linear(4, 4))
    model[3].weight = model[0].weight
    recipe = {"opt_level": None, "parameters": {"3.*": "fp32", "2.*": "fp32"}}
    hmpx.prepare(model, optim.SGD(model.parameters(), lr=1), recipe)
    assert "'3.*' does not hold for '3.weight', which is tied to '0.weight', whose name decides" in caplog.text
    assert model[3].weight.dtype is BF16 and model[3].bias.dtype is FP32
    for pattern, message in (
        ("3.weight", "'3.weight' is tied to '0.weight'"),
        ("3.w*", "'3.w*' fits '3.weight', which"),
    ):
        with pytest.raises(hmpx.HmpxError, match=re.escape(f"parameters: {message}")):
            hmpx.prepare(model, optim.SGD(model.parameters(), lr=1), {"parameters": {pattern: "fp32"}})


def test_rules_for_one_of_two_optimizers():
    """Each gets those that fit its own parameters."""
    with hmpx.activate({"opt_level": None, "parameters": {"0.*": {"weights": "split"}, "2.*": {"weights": "master"}}}):
        model = made()
        one = optim.AdamW([(n, p) for n, p in model.named_parameters() if n[0] != "2"])
        other = optim.SGD([(n, p) for n, p in model.named_parameters() if n[0] == "2"], lr=0.1)
    assert [pattern for pattern, _ in one._hmpx_attachment.settings.rules] == ["0.*"]
    assert [pattern for pattern, _ in other._hmpx_attachment.settings.rules] == ["2.*"]
    prepared = made()
    by_hand = optim.AdamW(prepared[0].parameters())
    hmpx.prepare(prepared, by_hand, {"opt_level": None, "parameters": {"2.*": {"weights": "master"}}})


def test_an_optimizer_that_knows_other_names_is_told():
    model = made()
    with hmpx.activate({"opt_level": None, "parameters": {"0.*": {"weights": "split"}}}):
        named = [(f"own.{name}", p) for name, p in model.named_parameters()]
        with pytest.raises(hmpx.HmpxError, match=r"AdamW knows parameter '0\.weight' as 'own\.0\.weight'"):
            optim.AdamW(named)
