"""The shell commands, run as a user runs them."""

import os
import re
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx.insight.check import is_recipe
from hmpx.ops.policies.lists import shipped
from hmpx.recipes.reading import read_recipe, recipe_names
from hmpx.shell.main import main
from tests.support import python


def run(capsys, *arguments):
    status = main(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_explain_lists_the_ops_with_a_text_in_their_name(capsys, tmp_path):
    status, out, _ = run(capsys, "explain", "softma")
    line = next(line for line in out.splitlines() if line.startswith("softmax "))
    told = line.split(None, 2)[1:]
    assert status == 0 and told == ["fp32", "torch.softmax, torch._VF.softmax, Tensor.softmax"]
    (tmp_path / "mine.txt").write_text("softmax\nstatistics.mean\nstatistics.median\n")
    _, out, _ = run(capsys, "explain", "--all", "--list", str(tmp_path / "mine.txt"))
    assert next(line for line in out.splitlines() if line.startswith("softmax ")).split()[1] == "bf16"
    _, out, _ = run(capsys, "explain", "mea", "--list", str(tmp_path / "mine.txt"))
    names = [line.split()[0] for line in out.splitlines()]
    assert "mean" in names and all("mea" in name for name in names[1:]) and names[-1] == "statistics.mean"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        *(("weights: split\n", True), ("weigths: split\nbf16: [mm]\n", True)),
        *(("bf16: [mm]\nfp23: [exp]\n", False), ("nothing: like it\n", False), ("- mm\n", False), (":\n- :", False)),
    ],
)
def test_a_yaml_file_is_a_recipe_where_a_key_is_one_of_a_recipes(text, meant, tmp_path):
    (tmp_path / "mine.yaml").write_text(text)
    assert is_recipe(str(tmp_path / "mine.yaml")) == meant


def test_explain_passes_the_shipped_lists_and_recipes(capsys):
    names = recipe_names()
    files = [*map(str, shipped().glob("*/*.txt")), *map(str, shipped().glob("recipes/*.yaml"))]
    assert len(files) == 26 + len(names)
    assert run(capsys, "explain", *names, *files)[:2] == (0, f"{26 + 2 * len(names)} checked, 0 problems\n")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["softmax"], ["fp32: listed at", "fp32.txt:", "torch.softmax"]),
        (["add"], ["promote: listed at", "nothing is patched", "Tensor.__radd__", "  in place      Tensor.add_"]),
        (["cross_entropy_loss"], ["cross_entropy_loss is cross_entropy"]),
        (["multiply"], ["bf16: as mul"]),
        (["lstm"], ["bf16: in no list; follows linear, listed at"]),
        (["huber_loss"], ["first input: in no list"]),
        (["exp"], ["exp"]),
        (["tanh"], ["none: in no list"]),
        (["softmax", "--opt-level", "O2"], ["fp32: decided by opt_level O2"]),
    ],
)
def test_explain_says_which_rule_and_why(capsys, arguments, words):
    status, out, _ = run(capsys, "explain", *arguments)
    assert status == 0 and all(word in out for word in words), out


def test_bytes_of_a_model_say_what_is_left_out(capsys, tmp_path):
    status, out, _ = run(capsys, "explain", "lean", "--params", "7e9")
    assert status == 0 and "lean, fsdp2" in out and "lean, ddp" not in out
    assert out.splitlines()[-1].startswith("lean has no rows for ddp and zero1: release_gradients steps before Distri")
    out = run(capsys, "explain", "neuron-bf16-sr", "--params", "7e9")[1]
    assert "has no rows" not in out and "neuron-bf16-sr, ddp" in out
    (tmp_path / "mine.yaml").write_text('parameters: {a: fp32, "*.bias": fp32}\n')
    said = run(capsys, "explain", str(tmp_path / "mine.yaml"), "--params", "7e9")[1].splitlines()[-1]
    assert "without its exceptions by name ('a', '*.bias')" in said
    own_steps = run(capsys, "explain", "bf16-sr", "--set", "fused=false", "--params", "7e9")[1].splitlines()[-1]
    assert own_steps == "a step of bf16-sr takes 16 bytes of each element of the largest parameter, or more"


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"hmpx {hmpx.__version__}, torch {torch.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", hmpx.__version__)
    status, out, err = run(capsys)
    assert status == 0 and not err and "examples:" in out
    assert re.findall(r"^    (\w+) ", out, re.MULTILINE) == COMMANDS


COMMANDS = ["doctor", "run", "explain", "record", "report", "compare", "tune"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_description_an_example_and_its_arguments_explained(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    usage, description, *_ = out.split("\n\n")
    assert usage.startswith("usage: ") and len(description) > 30 and f" {command}" in out.partition("example")[2]
    assert not re.findall(r"^  (\S+)$(?!\n {10})", out.partition("options:")[0], re.MULTILINE)  # a bare positional
    assert not re.findall(r"^  (-\S+(?: [A-Z]+)?)$(?!\n {10})", out, re.MULTILINE)  # a bare option


def test_a_mistyped_command_is_told_what_it_may_be(capsys):
    for word, hint in (
        ("explian", "did you mean 'explain'?"),
        ("lean", "'lean' is a recipe: explain lean"),
        ("check", "write `explain FILE`"),
        ("recipes", "write `explain`, or `explain NAME --yaml`"),
        ("bench", "it is `python examples/bench`"),
    ):
        with pytest.raises(SystemExit) as end:
            main([word])
        assert end.value.code == 2 and hint in capsys.readouterr().err


def test_hmpx_is_a_console_script_too(tmp_path):
    """Its entry point, run as pip's script does, under a name in HMPX_RECIPE that is no recipe."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    module, function = re.search(r'^\[project.scripts\]\nhmpx = "([\w.]+):(\w+)"$', project, re.MULTILINE).groups()
    script = tmp_path / "hmpx"
    script.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    environment = {**os.environ, "HMPX_RECIPE": "nowhere"}
    done = python.run(script, "explain", "softmax", env=environment)
    assert done.returncode == 0 and done.stdout.startswith("softmax\n"), done.stderr
    done = python.run(script, "run", "x.py", env=environment)
    assert done.returncode == 2 and done.stderr.startswith("hmpx: there is no recipe 'nowhere'")
    usage = python.run(script).stdout
    assert usage.startswith("usage: hmpx ") and "  hmpx explain" in usage


def test_recipes_are_a_table_and_one_of_them_a_file(capsys, tmp_path):
    """By kind: name, bytes a parameter, for whom; and it fits into 100 columns."""
    status, out, _ = run(capsys, "explain")
    rows = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines() if line.startswith("  ")}
    assert status == 0 and sorted(rows) == recipe_names()
    assert max(map(len, out.split("\n\n")[0].splitlines())) <= 100
    for name, (size, _for_whom) in rows.items():
        assert size == f"{sum(read_recipe(name).bytes_per_parameter().values()):.3g}"
    assert rows["autocast-cuda"] == ["16", "training under torch.autocast on a GPU"]
    assert out.index("  lean8 ") < out.index("FP32 weights\n") < out.index("  hmp-o1 ") < out.index("  deepseek-v3 ")
    status, out, _ = run(capsys, "explain", "nxd-standard", "--yaml")
    (tmp_path / "mine.yaml").write_text(out)
    assert status == 0 and read_recipe(tmp_path / "mine.yaml") == read_recipe("nxd-standard").inlined()
    assert run(capsys, "explain", "lean", "--yaml", "--set", "seed=3")[1].count("seed: 3\n") == 1


def test_one_list_without_a_fault_is_explained(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bf16.txt").write_text("linear\ngelu\n")
    status, out, _ = run(capsys, "explain", "bf16.txt")
    assert (status, out) == run(capsys, "explain", "--list", "bf16.txt")[:2] and "2: gelu, linear" in out
    assert "and --bf16 other.txt is another" in run(capsys, "explain", "bf16.txt", "--list", "other.txt")[2]


def test_explain_takes_several_ops(capsys):
    status, out, _ = run(capsys, "explain", "softmax", "gelu")
    alone = [run(capsys, "explain", name)[1] for name in ("softmax", "gelu")]
    assert status == 0 and out == "".join(alone)


def test_explain_takes_a_recipe(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("bf16: [gelu]\n")
    (tmp_path / "null.yaml").write_text("opt_level: null\n")
    assert "bf16: listed at mine.yaml:1" in run(capsys, "explain", "gelu", "--recipe", "mine.yaml")[1]
    rows = run(capsys, "explain", "gel", "--recipe", "mine.yaml")[1].splitlines()
    assert next(row for row in rows if row.startswith("gelu ")).split()[1] == "bf16"
    assert "leaves torch's ops as they are" in run(capsys, "explain", "gelu", "--recipe", "null.yaml")[2]


def test_explain_without_an_op_says_what_a_recipe_does_and_counts_its_lists(capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text("bf16: [gelu, linear]\nfp32: []\npromote: []\n")
    status, out, _ = run(capsys, "explain", "--recipe", str(tmp_path / "mine.yaml"))
    of_file = run(capsys, "explain", str(tmp_path / "mine.yaml"))[1].splitlines()
    lines = out.splitlines()
    assert status == 0 and lines[: len(of_file)] == of_file
    assert lines[len(of_file)] == "bf16 list    2: gelu, linear" and "explain --all" in lines[-1]
    assert len(lines) == len(of_file) + 2
