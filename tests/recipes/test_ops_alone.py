"""A recipe whose keys are all about ops leaves the parameters as they are; one that casts them says so."""

import logging

import pytest
import torch

import hmpx
from hmpx.recipes.reading import as_recipe, read_recipe
from tests.support.spanning import spanning

LISTS = {"bf16": ["linear"], "fp32": ["softmax"], "modules": {"2": {"fp32": ["linear"]}}}
FP32, BF16 = torch.float32, torch.bfloat16


def made(dtype=FP32):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def stated(form, tmp_path):
    if form == "dict":
        return LISTS
    path = tmp_path / "lists.yaml"
    path.write_text("bf16: [linear]\nfp32: [softmax]\nmodules: {'2': {fp32: [linear]}}\n")
    return path if form == "file" else {"extends": path, "promote": ["add"]}


@pytest.mark.parametrize(("form", "how"), spanning(["dict", "file", "extended"], ["prepare", "activate"]))
def test_fp32_weights_stay_and_ops_run_as_the_lists_say(form, how, tmp_path, caplog):
    recipe = stated(form, tmp_path)
    with caplog.at_level(logging.WARNING, "hmpx"):
        if how == "prepare":
            model, optimizer = hmpx.prepare(*made(), recipe)
        else:
            hmpx.activate(recipe)
            model, optimizer = made()
    assert {p.dtype for p in model.parameters()} == {FP32} and not hasattr(optimizer, "_hmpx_attachment")
    assert not caplog.text
    assert model[0](torch.ones(1, 4)).dtype is BF16 and model(torch.ones(1, 4)).dtype is FP32
    hmpx.restore(optimizer)
    assert model(torch.ones(1, 4)).dtype is FP32  # as before


def test_bf16_weights_that_are_there_stay_and_are_rounded_stochastically():
    """The reference is `attach`, under the same lists by `convert`."""
    trained = []
    for ours in (True, False):
        model, optimizer = made(BF16)
        if ours:
            hmpx.prepare(model, optimizer, {"bf16": ["linear"], "fp32": ["softmax"]})
        else:
            hmpx.convert(bf16=["linear"], fp32=["softmax"])
            hmpx.attach(optimizer, model=model)
        for _ in range(3):
            model(torch.ones(2, 4)).float().square().sum().backward()
            optimizer.step()
        assert {p.dtype for p in model.parameters()} == {BF16}
        hmpx.restore(optimizer)
        trained.append([*model.parameters()])
    assert all(map(torch.equal, *trained))


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [
        ({"opt_level": "O2"}, None),
        ({"low_precision": "fp16", "kernels": "native", "verbose": False}, None),
        ({"weights": "split", "bf16": ["linear"]}, "bfloat16"),
        ({"parameter_dtype": None, "weights": "split"}, None),
        ({"parameter_dtype": "fp32", "bf16": ["linear"]}, "float32"),
        ({"extends": "hmp-o1", "bf16": ["linear"]}, "float32"),
        ({"extends": "bf16-sr", "bf16": ["linear"]}, "bfloat16"),
        ({"opt_level": None}, "bfloat16"),
        ({}, "bfloat16"),
    ],
    ids=str,
)
def test_which_recipes_are_about_ops_alone(recipe, dtype):
    assert as_recipe(recipe).parameter_dtype == dtype


def test_it_prints_as_a_file_that_reads_back(tmp_path):
    recipe = as_recipe(LISTS).inlined()
    path = tmp_path / "printed.yaml"
    path.write_text(str(recipe))
    assert "parameter_dtype: null" in str(recipe) and as_recipe(path) == recipe


def test_explain_says_so(capsys):
    hmpx.explain(LISTS)
    said = capsys.readouterr().out
    assert "weights      as they are" in said
    assert "updates      plain steps in float32; of bfloat16 weights: computed in FP32 and written back" in said


@pytest.mark.parametrize("how", ["prepare", "activate"])
@pytest.mark.parametrize(("recipe", "before", "after"), [("bf16-sr", FP32, "bfloat16"), ("hmp-o1", BF16, "float32")])
def test_a_recipe_that_casts_parameters_says_so_in_one_line(how, recipe, before, after, caplog):
    with caplog.at_level(logging.INFO, "hmpx"):
        if how == "prepare":
            hmpx.prepare(*made(before), recipe)
        else:
            hmpx.activate(recipe)
            made(before)
    hmpx.restore()
    said = [message for message in caplog.messages if "were cast" in message]
    assert said == [f"hmpx: 4 parameters (40 numbers) were cast to {after} by the recipe"]


def test_a_null_that_is_stated_is_a_value_and_extending_it_casts_no_parameter(tmp_path):
    """A recipe of ops alone says nothing of parameters, so a key about weights brings their usual dtype."""
    (tmp_path / "stated.yaml").write_text("weights: split\nparameter_dtype: null\n")
    (tmp_path / "ops.yaml").write_text("bf16: [linear]\n")
    for name, dtype in (("stated", None), ("ops", "bfloat16")):
        base = tmp_path / f"{name}.yaml"
        assert as_recipe({"extends": base, "seed": 1}).parameter_dtype == dtype, name
        assert as_recipe({"extends": read_recipe(base), "seed": 1}).parameter_dtype == dtype, name
        (tmp_path / "again.yaml").write_text(f"extends: {name}.yaml\nfp32: [exp]\n")
        assert as_recipe({"extends": tmp_path / "again.yaml", "seed": 1}).parameter_dtype == dtype, name
    assert as_recipe({"extends": hmpx.Recipe(parameter_dtype=None), "seed": 1}).parameter_dtype is None
