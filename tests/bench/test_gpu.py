"""`bench gpu`: one line where there is no GPU; else a JSON, a page, and what fell short."""

from __future__ import annotations

import json

import pytest
import torch

from hmpx.bench import gpu, updates
from hmpx.bench.measure import Bench, Line
from hmpx.shell.main import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys, tmp_path):
    assert main(["bench", "gpu", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "wants a GPU" in said.err
    assert not [*tmp_path.iterdir()]


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
