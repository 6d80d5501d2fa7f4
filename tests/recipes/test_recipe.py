"""Recipes, and `prepare`."""

import dataclasses
import itertools
from collections import OrderedDict

import pytest
import torch
import yaml
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import hmpx
from hmpx.recipes.reading import as_recipe, read_recipe, recipe_names
from tests.support import ranks
from tests.support.sharded import digest

BF16 = torch.bfloat16
NXD = {"use_master_weights": True, "use_fp32_grad_acc": True, "use_master_weights_in_ckpt": True}


def test_a_recipe_is_a_file_a_dict_or_itself(tmp_path):
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "mine.txt").write_text("linear\n")
    path = tmp_path / "mine.yaml"
    path.write_text("opt_level: O1\nbf16_file_path: lists/mine.txt\nweights: split\nseed: 7\n")
    recipe = read_recipe(path)
    assert recipe.bf16_file_path == str(tmp_path / "lists" / "mine.txt") and recipe.weights == "split"
    assert as_recipe(dataclasses.asdict(recipe)) == recipe == as_recipe(recipe) == as_recipe(str(path))
    assert recipe.policy().bf16 == ("linear",)
    with hmpx.activate(path) as handle:
        (tmp_path / "lists" / "mine.txt").unlink()
        assert yaml.safe_load(str(handle.recipe))["bf16"] == ["linear"]


def test_dtypes_in_short_and_torchs_own(tmp_path):
    long = as_recipe({"parameter_dtype": "bfloat16", "parameters": {"*.norm*": "float32"}, "state_dtype": "bfloat16"})
    (tmp_path / "short.yaml").write_text('parameters: {"*.norm*": fp32}\nstate_dtype: bf16\n')
    own = {"parameter_dtype": BF16, "parameters": {"*.norm*": torch.float32}, "state_dtype": BF16}
    assert long == read_recipe(tmp_path / "short.yaml") == as_recipe(own)
    assert as_recipe({"dtype_map": {torch.float64: "fp32"}}).mapped() == {torch.float64: torch.float32}


def test_nxds_own_configuration_has_nxds_defaults_which_depend_on_zero(tmp_path):
    standard = read_recipe("nxd-standard")
    for zero, masters, gradients in itertools.product((False, True), (None, False, True), (None, False, True)):
        given = {"use_master_weights": masters, "use_fp32_grad_acc": gradients}
        given = {key: value for key, value in given.items() if value is not None}
        config = {"mixed_precision_config": given}
        (tmp_path / "nxd.yaml").write_text(yaml.safe_dump(config))
        recipe = hmpx.Recipe.from_nxd(given, with_zero=zero)
        assert recipe == as_recipe(config).under_zero(zero) == as_recipe(tmp_path / "nxd.yaml").under_zero(zero)
        nearer = as_recipe({"extends": tmp_path / "nxd.yaml", "weights": "split"}).under_zero(zero)
        assert nearer == dataclasses.replace(recipe, weights="split")  # a nearer word goes before a default
        held = zero if masters is None else masters
        assert recipe.weights == ("master" if held else "nearest") and not recipe.use_master_weights_in_ckpt
        assert recipe.use_fp32_grad_acc == (zero if gradients is None else gradients)
        assert dataclasses.replace(recipe, weights="master", use_fp32_grad_acc=True) == standard
        assert hmpx.Recipe.from_nxd(NXD, with_zero=zero) == dataclasses.replace(
            standard, use_master_weights_in_ckpt=True
        )


def test_nxds_configuration_in_words(capsys):
    hmpx.explain({"mixed_precision_config": {"use_master_weights": True}})
    own = capsys.readouterr().out
    hmpx.explain(dataclasses.replace(read_recipe("nxd-standard"), use_fp32_grad_acc=False))
    assert own == capsys.readouterr().out and "FP32 masters" in own


def _refused(rank):
    found = []
    nxds = {"mixed_precision_config": {"use_master_weights": bool(rank), "use_fp32_grad_acc": False}}
    for config in (("bf16-sr", "bf16-sx")[rank], nxds, "neuron-bf16-sr"):
        model = nn.Linear(4, 4)
        replica = DistributedDataParallel(model)
        optimizer = optim.SGD(model.parameters(), lr=1e-2)
        before = digest(dict(model.named_parameters()))
        try:
            hmpx.prepare(replica, optimizer, config)
        except hmpx.HmpxError as error:
            found.append(str(error))
        assert digest(dict(model.named_parameters())) == before and not hasattr(optimizer, "_hmpx_attachment")
    return found


def test_a_recipe_that_one_rank_lacks_or_has_otherwise_and_a_cast_that_comes_too_late():
    first, second = ranks.run(2, _refused)
    assert "hmpx.prepare was refused on rank 1" in first[0] and "did you mean 'bf16-sr'" in first[0]
    assert "weights is 'master', not 'nearest'" in second[1] and "rank 1 differs from rank 0" in second[1]
    assert all("before the model is wrapped" in messages[2] for messages in (first, second))


@pytest.mark.parametrize(
    ("order", "wrapped"), [(1, False), (-1, True)], ids=["as it is", "compiled, and a block under checkpointing"]
)
def test_the_last_pattern_that_fits_decides_and_a_wrapper_is_no_part_of_a_name(order, wrapped):
    patterns = {"blocks.*": "float32", "blocks.1.*": "bfloat16"}
    block = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)]
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "blocks": nn.ModuleList(block), "last": nn.Linear(4, 4)})
    model["last"].weight = model["first"].weight  # of a tied one, the first name decides
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    if wrapped:
        model["blocks"][1] = checkpoint_wrapper(model["blocks"][1])
    recipe = {"opt_level": None, "parameters": {**dict([*patterns.items()][::order]), "last.*": "float32"}}
    hmpx.prepare(torch.compile(model) if wrapped else model, optimizer, recipe)
    found = {name.replace("_checkpoint_wrapped_module.", ""): p.dtype for name, p in model.named_parameters()}
    second = BF16 if order == 1 else torch.float32
    assert {found[f"blocks.1.{i}.{kind}"] for i in range(2) for kind in ("weight", "bias")} == {second}
    assert {found[f"blocks.0.{i}.{kind}"] for i in range(2) for kind in ("weight", "bias")} == {torch.float32}
    assert found["first.weight"] is found["first.bias"] is BF16 and found["last.bias"] is torch.float32


def test_a_recipe_prints_as_a_file_that_is_complete_in_itself(tmp_path):
    """It says the same wherever it is saved: no path is left, and each key and op that decides something is in it."""
    for name in recipe_names():
        recipe = dataclasses.replace(read_recipe(name), parameters={"lm_head.*": "float32"}, seed=3)
        path = tmp_path / "printed.yaml"
        path.write_text(str(recipe))
        read = read_recipe(path)
        assert (read.policy(), read.settings()) == (recipe.policy(), recipe.settings()), name
        assert str(read) == str(recipe), name
        rest = ("opt_level", "kernels", "dtype_map", "parameter_dtype", "parameters")
        assert all(getattr(read, key) == getattr(recipe, key) for key in rest), name
        first, _, keys = path.read_text().partition("\n")
        assert first == f"# Written by hmpx {hmpx.__version__} with torch {torch.__version__}."
        written = yaml.safe_load(keys)
        assert not any(key.endswith("_path") for key in written) and {"opt_level", "weights", "kernels"} <= set(written)
        assert ("bf16" in written) == (recipe.opt_level == "O1"), name
    said = str(as_recipe({"mixed_precision_config": {"use_fp32_grad_acc": True}})).splitlines()[1]
    assert said.startswith("# Under ZeRO-1 NxD's defaults were others") and said.endswith("{weights: master}")


def test_several_optimizers_are_all_as_they_were_after_a_refusal():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = optim.SGD(model[0].parameters(), lr=1e-2), optim.LBFGS(model[1].parameters())
    with pytest.raises(hmpx.HmpxError, match="fused has kernels for"):
        hmpx.prepare(model, [first, second], {"fused": True})
    assert model[0].weight.dtype is torch.float32 and not hasattr(first, "_hmpx_attachment")
    for wrong in ([], [first, model]):
        with pytest.raises(hmpx.HmpxError, match="prepare needs a"):
            hmpx.prepare(model, wrong, "lean")


@pytest.mark.parametrize("first", ["activate", "prepare", "attach"])
def test_prepare_again_under_another_recipe_names_what_is_in_force_and_the_way_out(first, tmp_path):
    (tmp_path / "mine.yaml").write_text("weights: split\n")
    model = nn.Linear(4, 4)
    handle = hmpx.activate("neuron-bf16-sr") if first == "activate" else None
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    if handle is not None:
        handle.restore()
    elif first == "prepare":
        hmpx.prepare(model, optimizer, "neuron-bf16-sr")
        hmpx.prepare(model, optimizer, {"extends": "neuron-bf16-sr", "fp32": ["gelu"]})  # of ops alone
    else:
        hmpx.attach(optimizer)
    how = "is attached already (<hmpx.Attachment of SGD: weights='stochastic'>)"
    for other in ("lean8", tmp_path / "mine.yaml", "torchao-bf16-sr", *(["hmp-o1"] if first != "attach" else [])):
        with pytest.raises(hmpx.HmpxError) as error:
            hmpx.prepare(model, optimizer, other)
        said = str(error.value)
        assert how in said and "hmpx.detach(optimizer)" in said and ".yaml:" not in said
    hmpx.detach(optimizer)
    hmpx.prepare(model, optimizer, "torchao-bf16-sr")
    hmpx.restore()


def test_arguments_that_are_swapped_and_a_file_of_another_name_are_said(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = optim.AdamW(model.parameters())
    with pytest.raises(hmpx.HmpxError, match=r"^model is an AdamW, not .*; the two arguments are swapped: prep"):
        hmpx.prepare(optimizer, model, "bf16-sr")
    with pytest.raises(hmpx.HmpxError, match="a recipe is a name, a path or a dict, not a int"):
        hmpx.prepare(model, optimizer, 7)
    (tmp_path / "recipe.yaml").write_text("weights: split\n")
    for wrong in ("recipe.yml", "recipes.yaml"):
        with pytest.raises(hmpx.HmpxError, match=r"No such file or directory; did you mean 'recipe.yaml'\?"):
            hmpx.prepare(model, optimizer, tmp_path / wrong)
    names = [f"layer{i}" for i in range(12)]
    named = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names))
    with pytest.raises(hmpx.HmpxError, match=r"'9' is the name of no module \(there are layer0, .*9 and 2 more\)"):
        hmpx.prepare(named, optim.SGD(named.parameters(), lr=0.1), {"modules": {"9": "fp32"}})
