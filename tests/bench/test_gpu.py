"""`bench gpu`: one line where there is no GPU; else a JSON, a page, and what fell short."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from hmpx.bench import fp8, gpu, updates
from hmpx.bench.measure import Bench, Line
from hmpx.shell.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys, tmp_path):
    assert main(["bench", "gpu", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "wants a GPU" in said.err
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_fp8_alone_wants_a_gpu_too(capsys):
    assert main(["bench", "gpu", "fp8"]) == 2
    assert "bench gpu wants a GPU" in capsys.readouterr().err


def test_the_table_of_fp8_has_each_way_beside_bf16(monkeypatch):
    """On a CPU, where nothing is compiled; a way that fails is a note."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    ways = fp8.ways()
    broken = contextlib.nullcontext, lambda model: 1 / 0
    monkeypatch.setattr(fp8, "ways", lambda: {"BF16": ways["BF16"], "hmpx rowwise": ways["hmpx rowwise"], "x": broken})
    found = fp8.run(1, torch.device("cpu"), (64,), 32, 2)
    whats = "2 blocks eager", "one block compiled"
    names = [f"64 wide, {what}, {way}" for what in whats for way in ("BF16", "hmpx rowwise")]
    assert [row.name for row in found.rows] == names and all(row.figures["ratio"] > 0 for row in found.rows)
    assert found.notes[-1] == "64 wide, one block compiled, x: ZeroDivisionError: division by zero"
    for each in gpu.EXPECTED_OF_FP8:
        assert each.missed({}).endswith("not measured") and each.row.split(", ")[-1] in ways


def table(name, ratio):
    return lambda: Bench("title", [Line("torch", {"ratio": 1.0}), Line(name, {"ratio": ratio})])


def broken():
    raise RuntimeError("no room\nat all")


@pytest.mark.parametrize(
    "ratio, tests, short",
    [
        (0.85, "passed (4 passed)", ["bench casts: RuntimeError: no room"]),
        (
            0.95,
            "exit status 1: 1 failed",
            [
                "tests with the marker cuda: exit status 1: 1 failed",
                "bench casts: RuntimeError: no room",
                "fused AdamW with BF16 state / torch's fused FP32 step: 0.95, expected at most 0.90",
            ],
        ),
    ],
)
def test_the_page_and_the_json_say_what_fell_short(tmp_path, ratio, tests, short):
    tables = {
        "rounding": table("hmpx Triton kernel", 1.1),
        "step": table("hmpx fused, BF16 states", ratio),
        "casts": broken,
    }
    printed = []
    assert gpu.report(tmp_path, {"GPU": "of paper"}, tables, tests, printed.append) == short
    page, whole = (tmp_path / "hmpx-gpu.md").read_text(), json.loads((tmp_path / "hmpx-gpu.json").read_text())
    assert page.startswith("# hmpx on of paper\n") and all(f"- {each}\n" in page for each in short)
    assert whole["short"] == short and whole["tables"]["step"]["rows"][1]["figures"]["ratio"] == ratio
    assert len(printed) == 2 and "hmpx Triton kernel" in page


def test_a_figure_that_nobody_has_measured_fell_short(tmp_path):
    assert gpu.report(tmp_path, {"GPU": "x"}, {}, "passed", print) == [
        f"{each.words}: not measured" for each in gpu.EXPECTED
    ]


def test_the_rows_of_which_something_is_expected_are_in_the_tables():
    """`bench rounding` and `bench step` call them so."""
    assert gpu.EXPECTED[1].row in updates._ways() and gpu.EXPECTED[0].row == "hmpx Triton kernel"
