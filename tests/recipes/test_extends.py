"""`extends`: a recipe that changes another one. The nearest word wins, wherever it is said."""

import argparse
import dataclasses
import functools
import re
import types

import pytest
import torch
import yaml
from torch import nn, optim

import hmpx
from hmpx.insight.check import check_files
from hmpx.recipes.activate import recipe_of_trainer
from hmpx.recipes.reading import as_recipe, read_recipe
from hmpx.shell.main import main
from hmpx.shell.options import add_recipe_options, recipe_asked


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("how", ["a file", "a dict", "a dict over a Recipe"])
def test_what_is_not_said_is_as_in_the_recipe_that_is_extended(how, tmp_path):
    keys = {"extends": "lean8", "weights": "split", "seed": 3}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(keys))
    base = read_recipe("lean8")
    given = {"a file": tmp_path / "mine.yaml", "a dict": keys, "a dict over a Recipe": {**keys, "extends": base}}
    assert as_recipe(given[how]) == dataclasses.replace(base, weights="split", seed=3)


def test_a_path_is_relative_to_the_file_and_so_are_the_lists_of_each_file(tmp_path, monkeypatch):
    (tmp_path / "far").mkdir(), (tmp_path / "near").mkdir()
    (tmp_path / "far" / "mine.txt").write_text("gelu\n")
    write(tmp_path, **{"far/base": "bf16_file_path: mine.txt\nweights: split\n"})
    write(tmp_path, **{"near/mine": "extends: ../far/base.yaml\nseed: 1\n"})
    monkeypatch.chdir(tmp_path / "near")
    for recipe in (read_recipe("mine.yaml"), as_recipe({"extends": "../far/base.yaml", "seed": 1})):
        assert recipe.policy().bf16 == ("gelu",) and (recipe.weights, recipe.seed) == ("split", 1)
        assert "gelu" in str(recipe) and "extends" not in str(recipe)  # resolved


def test_in_a_linked_folder_two_dots_are_where_the_link_leads(tmp_path, monkeypatch):
    """As `open` takes them: the folder above the one that the link stands for."""
    (tmp_path / "shared" / "team").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "shared" / "team")
    for folder, name in (("shared", "log"), (".", "exp")):
        (tmp_path / folder / "mine.txt").write_text(f"{name}\n")
        write(tmp_path / folder, base=f"fp32: [{name}]\nbf16: []\n")
    write(tmp_path / "shared" / "team", named="fp32_file_path: ../mine.txt\nbf16: []\n", over="extends: ../base.yaml\n")
    for path in ("link/named.yaml", "link/over.yaml"):
        assert read_recipe(tmp_path / path).policy().fp32 == ("log",), path
    monkeypatch.chdir(tmp_path)
    assert as_recipe({"bf16": [], "fp32_file_path": "link/../mine.txt"}).policy().fp32 == ("log",)
    options = argparse.ArgumentParser()
    add_recipe_options(options)
    for words in (["--fp32", "link/../mine.txt"], ["--set", "fp32_file_path=link/../mine.txt"]):
        asked = recipe_asked(options.parse_args([*words, "--set", "bf16=[]"]))
        assert asked.policy().fp32 == ("log",), words


@pytest.mark.parametrize("base", ["bf16: [gelu]\nfp32: [log]\n", "bf16_file_path: a.txt\nfp32_file_path: b.txt\n"])
def test_a_list_goes_in_the_place_of_that_list_however_it_was_said(base, tmp_path):
    for name, text in {"a.txt": "gelu", "b.txt": "log", "mm.txt": "mm", "both.yaml": "bf16: [mm]\nfp32: [exp]"}.items():
        (tmp_path / name).write_text(text)
    for nearer, bf16, fp32 in (
        ("seed: 1", ("gelu",), ("log",)),
        ("bf16: [mm]", ("mm",), ("log",)),
        ("bf16_file_path: mm.txt", ("mm",), ("log",)),
        ("bf16_file_path: both.yaml", ("mm",), ("exp",)),
        ("fp32: []", ("gelu",), ()),
    ):
        write(tmp_path, base=base, mine=f"extends: base.yaml\n{nearer}\n")
        policy = read_recipe(tmp_path / "mine.yaml").policy()
        assert (policy.bf16, policy.fp32) == (bf16, fp32), nearer


def test_another_opt_level_comes_without_the_lists_of_the_one_before():
    assert as_recipe({"extends": "neuron-bf16-sr", "opt_level": "O2"}).policy() == read_recipe("hmp-o2").policy()
    none = as_recipe({"extends": "apex-o1", "opt_level": None})
    assert none.policy() is None and none.parameter_dtype == "float32"
    default = as_recipe({"extends": "neuron-bf16-sr", "bf16": None, "fp32_file_path": "", "promote": None})
    assert default.policy().bf16 == hmpx.Recipe().policy().bf16


def test_dots_in_a_list_stand_for_the_names_of_the_recipe_that_it_changes(tmp_path):
    """What is added leaves the other lists; every name keeps the line that says it."""
    write(
        tmp_path,
        base="bf16: [linear, matmul]\nfp32: [exp]\npromote: [add]\n",
        mine="extends: base.yaml\nfp32:\n- ...\n- log\n- matmul\n",
    )
    base, mine = (tmp_path / name for name in ("base.yaml", "mine.yaml"))
    policy = read_recipe(mine).policy()
    assert (policy.bf16, policy.fp32, policy.promote) == (("linear",), ("exp", "log", "matmul"), ("add",))
    assert policy.origins["exp"] == f"{base}:2" and policy.origins["matmul"] == f"{mine}:5"
    assert as_recipe({"extends": mine, "bf16": ["tanh", ...]}).policy().bf16 == ("linear", "tanh")
    default, more = hmpx.Recipe().policy(), as_recipe({"fp32": [..., "linear"]}).policy()
    assert more.fp32 == (*sorted({*default.fp32, "linear"}),) and {*more.bf16} == {*default.bf16} - {"linear"}
    for keys in ({"extends": "hmp-o2"}, {"opt_level": None}):
        with pytest.raises(hmpx.HmpxError, match=r"takes no|would do nothing"):
            as_recipe({**keys, "fp32": [..., "log"]}).policy()
    with pytest.raises(hmpx.HmpxError, match=r"'\.\.\.' stands in the lists of recipes"):
        hmpx.convert(fp32=[..., "log"])
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nfp32:\n- ...\n- lgo\n")
    with pytest.raises(hmpx.HmpxError, match=r"mine.yaml:4: unknown op 'lgo'"):
        read_recipe(mine)


def test_rules_lie_behind_those_that_are_extended(tmp_path):
    """So of two that fit, the nearer decides; a pattern that both have is the nearer one's."""
    write(
        tmp_path,
        base='modules: {"0": fp32, "1": {fp32: [relu]}}\nparameters: {"*": {weights: split}, "*.bias": fp32}\n',
        mine='extends: base.yaml\nmodules: {"0": {bf16: [linear]}}\nparameters: {"1.*": {weights: master}}\n',
    )
    recipe = read_recipe(tmp_path / "mine.yaml")
    assert list(recipe.modules.items()) == [("1", {"fp32": ["relu"]}), ("0", {"bf16": ["linear"]})]
    assert list(recipe.parameters) == ["*", "*.bias", "1.*"]
    assert recipe.settings().way("1.bias").weights == "master"
    assert hmpx.Recipe(modules={"1": {"fp32": ["relu"]}}).overlays().keys() < recipe.overlays().keys()


def test_every_line_is_that_of_the_file_that_says_it(tmp_path):
    write(
        tmp_path,
        base="seed: 1\nweights: nearest\nmodules: {nowhere: fp32}\nbf16:\n- gelu\n",
        mine="extends: base.yaml\nfp32: [log]\nuse_master_weights_in_ckpt: true\n",
        list="extends: base.yaml\nfp32: [gelu]\n",
    )
    base, mine = (tmp_path / name for name in ("base.yaml", "mine.yaml"))
    model = nn.Linear(2, 2)
    with pytest.raises(hmpx.HmpxError, match=re.escape(f"{mine}:3: weights='nearest' has no masters")):
        hmpx.prepare(model, optim.SGD(model.parameters()), mine)
    with pytest.raises(hmpx.HmpxError, match=re.escape(f"{base}:3: modules: 'nowhere' is the name of no")):
        hmpx.prepare(model, optim.SGD(model.parameters()), {"extends": base})
    policy = read_recipe(mine).policy()
    assert policy.origins["gelu"] == f"{base}:5" and policy.origins["log"] == f"{mine}:2"
    with pytest.raises(
        hmpx.HmpxError, match=re.escape(f"list.yaml:2: 'gelu' is on both sides; in the bf16 list at {base}:5")
    ):
        read_recipe(tmp_path / "list.yaml")
    with pytest.raises(hmpx.HmpxError, match=r"recipe: 'exp' is on both .* \(in a recipe, bf16: \[..., exp\] does\)"):
        as_recipe({"extends": "autocast-cuda", "bf16": ["exp"]}).policy()
    assert "exp" in as_recipe({"extends": "autocast-cuda", "bf16": ["...", "exp"]}).policy().bf16


def test_a_long_chain_is_refused(tmp_path):
    write(tmp_path, **{"a" * (i + 1): f"extends: {'a' * (i + 2)}.yaml\n" for i in range(40)})
    with pytest.raises(hmpx.HmpxError, match="more than 32 recipes that ext"):
        read_recipe(tmp_path / "a.yaml")
    assert "more than 32 recipes that ext" in "\n".join(map(str, check_files([str(tmp_path / "a.yaml")])))


def test_keys_lie_over_a_recipe_wherever_one_is_taken(tmp_path):
    """As `extends` has it; what is no key, and what cannot act, is refused before anything is changed."""
    (tmp_path / "mine.yaml").write_text("extends: bf16-sr\nseed: 3\n")
    for base in ("bf16-sr", tmp_path / "mine.yaml", {"extends": "bf16-sr", "seed": 3}, read_recipe("bf16-sr")):
        wanted = as_recipe({"extends": as_recipe(base), "state_dtype": "8bit"})
        assert recipe_of_trainer(base, state_dtype="8bit") == wanted.inlined()
        with hmpx.activate(base, state_dtype="8bit") as handle:
            assert handle.recipe == wanted.inlined()
        model = nn.Linear(4, 4)
        hmpx.prepare(model, optimizer := optim.AdamW(model.parameters()), base, state_dtype="8bit")
        assert hmpx.updates.attach.attached(optimizer).settings == wanted.settings()
        hmpx.restore(optimizer)
    prepare = functools.partial(hmpx.prepare, model := nn.Linear(4, 4), optim.SGD(model.parameters()))
    for keys, said in (
        ({"state_dtyp": "8bit"}, "did you mean 'state_dtype'"),
        ({"extends": "lean"}, "the recipe is given already"),
        ({"parameter_dtype": "float32", "state_dtype": "8bit"}, "state_dtype: 8bit would do nothing"),
    ):
        for take in (recipe_of_trainer, hmpx.activate, prepare):
            with pytest.raises(hmpx.HmpxError, match=said):
                take("bf16-sr", **keys)
    assert model.weight.dtype is torch.float32 and not isinstance(torch.matmul, types.FunctionType)


SETTINGS = [
    (["use_master_weights_in_ckpt=true", "weights=split"], {"use_master_weights_in_ckpt": True, "weights": "split"}),
    (["state_dtype=bf16"], {"state_dtype": "bfloat16"}),
    (["bf16=[linear, mm]"], {"bf16": ("linear", "mm"), "bf16_file_path": ""}),
    (["bf16=[mm]", "opt_level=O1"], {"bf16": ("mm",), "bf16_file_path": ""}),
    (['modules={"0": fp32}'], {"modules": {"0": "float32"}}),
    (["seed=1", "seed=2"], {"seed": 2}),
    (["low_precision="], {"low_precision": None}),
]


def test_set_says_any_key_from_the_shell(capsys):
    for settings, expected in SETTINGS:
        words = [word for setting in settings for word in ("--set", setting)]
        assert main(["explain", "neuron-bf16-sr", *words]) == 0
        said = capsys.readouterr().out
        hmpx.explain(dataclasses.replace(read_recipe("neuron-bf16-sr"), **expected))
        assert capsys.readouterr().out == said, settings
