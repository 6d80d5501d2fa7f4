"""A Gaudi configuration is a recipe, wherever one is taken."""

from __future__ import annotations

import json
import logging

import pytest
import torch

import hmpx
from hmpx.recipes.reading import as_recipe
from hmpx.shell.main import main
from tests.support import python

# As published for BERT, with what the configuration of another library says beside it.
PUBLISHED = {
    "use_habana_mixed_precision": True,
    "hmp_is_verbose": False,
    "use_fused_adam": True,
    "hmp_opt_level": "O1",
    "hmp_bf16_ops": ["add", "linear", "matmul"],
    "hmp_fp32_ops": ["embedding", "log_softmax"],
}


@pytest.fixture
def written(tmp_path):
    def write(**keys):
        path = tmp_path / "gaudi_config.json"
        path.write_text(json.dumps(keys, indent="\t"))
        return path

    return write


def test_its_keys_are_those_of_hmp(written, caplog):
    with caplog.at_level(logging.INFO, "hmpx"):
        recipe = as_recipe(written(**PUBLISHED))
    assert recipe.policy().bf16 == ("add", "linear", "matmul")
    assert recipe.policy().fp32 == ("embedding", "log_softmax")
    assert (recipe.opt_level, recipe.parameter_dtype, recipe.verbose) == ("O1", "float32", False)
    assert caplog.messages == [caplog.messages[0]] and "use_fused_adam left aside" in caplog.text
    assert as_recipe(written(**PUBLISHED | {"hmp_is_verbose": True})).verbose
    assert "verbose: true" in str(as_recipe(written(**PUBLISHED | {"hmp_is_verbose": True})))


def test_lists_that_are_left_out_are_those_of_optimum_habana(written):
    """Its `DEFAULT_BF16_OPS` and `DEFAULT_FP32_OPS`; an empty list is a list."""
    policy = as_recipe(written(use_habana_mixed_precision=True, hmp_fp32_ops=[])).policy()
    assert len(policy.bf16) == 14 and {"gelu", "softmax", "iadd"} < set(policy.bf16) and policy.fp32 == ()


def test_o2_decides_by_itself_and_without_mixed_precision_nothing_is_cast(written):
    assert as_recipe(written(**PUBLISHED | {"hmp_opt_level": "O2"})).policy().opt_level == "O2"
    assert as_recipe(written(**PUBLISHED | {"use_habana_mixed_precision": False})).policy() is None


@pytest.mark.parametrize(
    "keys, said",
    [
        ({"hmp_opt_level": "O3"}, r"json:6: hmp_opt_level is 'O3', none of O1, O2"),
        ({"hmp_bf16_ops": "add"}, r"json:7: hmp_bf16_ops is 'add', not a list of names"),
        ({"hmp_bf16_ops": ["add", "liner"]}, r"json:9: unknown op 'liner'; did you mean 'linear'"),
        ({"hmp_is_verbose": 1}, r"json:4: hmp_is_verbose is 1, neither true nor false"),
        ({"hmp_bf16_opps": []}, r"'hmp_bf16_opps' is no key of a Gaudi configuration; did you mean 'hmp_bf16_ops'"),
        (
            {"use_torch_autocast": True},
            "json:16: use_torch_autocast and use_habana_mixed_precision are both true: which",
        ),
        ({"autocast_bf16_ops": "add"}, "json:16: autocast_bf16_ops is 'add', not a list of names"),
        ({"autocast_ops": []}, "'autocast_ops' is no key of a Gaudi configuration"),
        ({"hmp_fp32_ops": None}, "hmp_fp32_ops is None, not a list of names"),
        ({"hmp_fp32_ops": ["add"]}, "add"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(written, keys, said):
    with pytest.raises(hmpx.HmpxError, match=said):
        as_recipe(written(first=0, **PUBLISHED | keys))


def test_another_json_file_is_no_recipe(written):
    with pytest.raises(hmpx.HmpxError, match=r"json:1: no Gaudi configuration, which says .*or use_torch_autocast"):
        as_recipe(written(hmp_bf16_ops=["add"]))


# As published for GPT-2, with what its library writes beside it.
NEWER = {
    "use_fused_adam": True,
    "use_torch_autocast": True,
    "autocast_bf16_ops": "add addmm bmm div dropout gelu iadd linear layer_norm matmul mm rsub softmax truediv".split(),
    "autocast_fp32_ops": ["embedding", "nll_loss", "log_softmax", "cross_entropy"],
    "use_habana_mixed_precision": False,
    "hmp_bf16_ops": ["add"],
}


def test_the_newer_generation_has_gaudis_own_lists_where_none_is_given(written, caplog):
    policy = as_recipe(written(**NEWER)).policy()
    assert (set(policy.bf16), set(policy.fp32)) == (set(NEWER["autocast_bf16_ops"]), set(NEWER["autocast_fp32_ops"]))
    assert {"cat", "mul", "pow"} < set(policy.promote) and as_recipe(written(**NEWER)).where == "model"
    own = as_recipe("gaudi-autocast").policy()
    assert as_recipe(written(use_torch_autocast=True)).policy() == own
    assert as_recipe(written(**NEWER | {"autocast_bf16_ops": None, "autocast_fp32_ops": None})).policy() == own
    policy = as_recipe(written(**NEWER | {"autocast_fp32_ops": None})).policy()
    assert set(own.fp32) - set(policy.fp32) == {"div", "truediv"} and set(policy.bf16) == set(
        NEWER["autocast_bf16_ops"]
    )
    assert as_recipe(written(**NEWER | {"autocast_fp32_ops": []})).policy().fp32 == ()
    assert as_recipe(written(use_torch_autocast=False)).policy() is None
    assert not caplog.text
    with pytest.raises(hmpx.HmpxError, match=r"json:6: unknown op 'lineer'; did you mean 'linear'"):
        as_recipe(written(first=0, use_torch_autocast=True, autocast_bf16_ops=["add", "lineer"])).policy()


def test_a_name_in_both_lists_of_the_newer_generation_is_bf16_and_said(written, caplog):
    path = written(use_torch_autocast=True, autocast_bf16_ops=["div"], autocast_fp32_ops=["truediv", "exp"])
    policy = as_recipe(path).policy()
    assert (policy.bf16, policy.fp32) == (("div",), ("exp",))
    (said,) = caplog.messages
    assert said.startswith(f"hmpx: {path}:7: 'truediv' is in the bf16 list too")


def test_prepare_and_run_take_one(written, tmp_path):
    path = written(**PUBLISHED)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hmpx.prepare(model, optimizer, path)
    assert model.weight.dtype is torch.float32 and model(torch.ones(1, 4)).dtype is torch.bfloat16
    assert model(torch.ones(1, 4)).log_softmax(-1).dtype is torch.float32
    hmpx.restore()
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint(torch.nn.Linear(4, 4)(torch.ones(1, 4)).dtype)\n")
    done = python.run("-m", "hmpx", "run", "--recipe", path, script)
    assert done.stdout == "torch.bfloat16\n", done.stderr


def test_the_commands_know_one_from_an_op_list(written, tmp_path, capsys):
    path = written(**PUBLISHED)
    assert main(["explain", str(path)]) == 0 and "3 in BF16, 2 in FP32" in capsys.readouterr().out
    assert main(["recipes", str(path)]) == 0 and "bf16: [add, linear, matmul]" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    assert main(["explain", str(written(use_torch_autocast=True))]) == 0 and "27 in BF16" in capsys.readouterr().out
    assert main(["check", str(written(**PUBLISHED | {"hmp_opt_level": "O3"}))]) == 1
    assert "gaudi_config.json:5: hmp_opt_level is 'O3'" in capsys.readouterr().out
    (tmp_path / "list.json").write_text('{"hmp_bf16_ops": ["add"]}')
    assert main(["explain", str(tmp_path / "list.json")]) == 2 and "is an op list" in capsys.readouterr().err
    (tmp_path / "list.json").write_text('["add"]')
    assert main(["check", str(tmp_path / "list.json")]) == 1
    assert "list.json:1: expected the keys hmp_bf16_ops, hmp_fp32_ops, found a list" in capsys.readouterr().out
