"""The shell commands, run as a user runs them."""

from __future__ import annotations

import json
import re

import pytest
import torch

import hmpx
from hmpx.__main__ import main


def run(capsys, *arguments):
    status = main(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_ops_lists_rule_and_entry_points(capsys, tmp_path):
    status, out, _ = run(capsys, "ops", "softmax")
    line = next(line for line in out.splitlines() if line.startswith("softmax "))
    assert status == 0 and line.split(None, 2) == [
        "softmax",
        "fp32",
        "torch.softmax, torch._VF.softmax, Tensor.softmax",
    ]
    (tmp_path / "mine.txt").write_text("softmax\n")
    _, out, _ = run(capsys, "ops", "softmax", "--list", str(tmp_path / "mine.txt"))
    assert next(line for line in out.splitlines() if line.startswith("softmax ")).split()[1] == "bf16"


def test_check_finds_typos_duplicates_and_both_sides(capsys, tmp_path):
    (tmp_path / "bf16.txt").write_text("conv2d\nsofmax\nmul\nconv2d\n")
    (tmp_path / "fp32.txt").write_text("log\nmul\n")
    (tmp_path / "both.yaml").write_text("bf16: [mm]\nfp32: [mm]\npromote: [mm]\n")
    files = [str(tmp_path / name) for name in ("bf16.txt", "fp32.txt", "both.yaml", "none.txt")]
    status, out, _ = run(capsys, "check", *files)
    assert status == 1
    assert f"{files[0]}:2: unknown op 'sofmax'; did you mean 'softmax'?" in out
    assert f"{files[0]}:4: 'conv2d' is a duplicate of 'conv2d' at {files[0]}:1" in out
    assert f"{files[1]}:2: 'mul' is on both sides; the other has it at {files[0]}:3" in out
    assert f"{files[2]}:2: 'mm' is on both sides" in out
    assert f"{files[3]}: no such op list file" in out
    assert "4 checked, 5 problems" in out


def test_check_passes_the_shipped_lists(capsys):
    from hmpx.casts.op_lists import shipped

    files = [str(path) for path in sorted(shipped().glob("*/*.txt"))]
    assert len(files) == 22 and run(capsys, "check", *files)[:2] == (0, "22 checked, 0 problems\n")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["softmax"], ["fp32: listed at", "fp32.txt:", "torch.softmax"]),
        (["add"], ["promote: listed at", "nothing is patched", "Tensor.__radd__", "Tensor.add_"]),
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


def test_errors_go_to_stderr_with_status_2(capsys, tmp_path):
    status, out, err = run(capsys, "explain", "sofmax")
    assert (status, out) == (2, "") and "hmpx: unknown op 'sofmax'; did you mean 'softmax'?" in err
    assert run(capsys, "ops", "--list", str(tmp_path))[0] == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("rounding", "--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("step", "--device", "nosuch"), "device 'nosuch':"),
    ],
)
def test_bench_refuses_before_it_measures(capsys, arguments, message):
    status, out, err = run(capsys, "bench", *arguments)
    assert status == 2 and message in err and not out


def test_bench_prints_a_table_and_writes_it_as_json(capsys, tmp_path):
    file = tmp_path / "figures.json"
    status, out, _ = run(capsys, "bench", "rounding", "--elements", "5000", "--repeat", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert status == 0 and rows[0]["name"] == "torch copy_" and rows[0]["figures"]["ratio"] == 1.0
    assert all(row["name"] in out for row in rows) and any(row["name"] == "hmpx eager kernel" for row in rows)
    status, out, _ = run(capsys, "bench", "step", "--elements", "20000", "--repeat", "1")
    assert status == 0 and "hmpx split, torch fused" in out


@pytest.mark.slow
def test_bench_sets_casts_and_models_beside_autocast(capsys, tmp_path):
    file = tmp_path / "figures.json"
    status, out, _ = run(capsys, "bench", "casts", "--repeat", "1")
    assert status == 0 and "hmpx/autocast" in out and "linear, BF16 comes" in out
    status, out, _ = run(capsys, "bench", "train", "--models", "mlp", "--eager", "--repeat", "1", "--json", str(file))
    rows = {row["name"]: row["figures"] for row in json.loads(file.read_text())["rows"]}
    assert status == 0 and len(rows) == 4 and all(name in out for name in rows)
    step, inference = rows["mlp, eager, step"], rows["mlp, eager, inference"]
    assert (
        step["hmpx/autocast"] == pytest.approx(step["hmpx ms"] / step["autocast ms"]) and "hmpx cached ms" in inference
    )


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"hmpx {hmpx.__version__}, torch {torch.__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", hmpx.__version__)
    status, out, err = run(capsys)
    assert status == 0 and not err and all(command in out for command in ("run", "ops", "check", "explain", "bench"))
