"""`bench gpu`: one line where there is no GPU; else a process for each part, a JSON, a page, and what fell short."""

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from tests.support.bench import Bench, Line, gpt, gpu, main, updates


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys, tmp_path):
    assert main(["gpu", "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and "wants a GPU" in said.err
    assert not [*tmp_path.iterdir()]


def test_the_table_of_fp8_has_each_way_beside_bf16(monkeypatch):
    """On a CPU, where nothing is compiled; a way that fails is a note."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    ways = gpt.fp8_ways()
    broken = contextlib.nullcontext, lambda model: 1 / 0
    monkeypatch.setattr(
        gpt, "fp8_ways", lambda: {"BF16": ways["BF16"], "hmpx rowwise": ways["hmpx rowwise"], "x": broken}
    )
    found = gpt.run_fp8(1, torch.device("cpu"), (64,), 32, 2)
    whats = "2 blocks eager", "one block compiled"
    names = [f"64 wide, {what}, {way}" for what in whats for way in ("BF16", "hmpx rowwise")]
    assert [row.name for row in found.rows] == names and all(row.figures["ratio"] > 0 for row in found.rows)
    assert found.notes[-1] == "64 wide, one block compiled, x: ZeroDivisionError: division by zero"
    assert all(each.row.split(", ")[-1] in ways for each in gpu.EXPECTED["fp8"])


def test_a_training_of_a_gpt_has_a_row_for_each_way():
    """On a CPU, of a small one; a recipe that is not there is a note."""
    found = gpt.run(1, torch.device("cpu"), gpt.Size(64, 1, 128, 16, 2), ("lean8", "nothing"), ())
    assert [row.name for row in found.rows] == [f"eager, {way}" for way in ("FP32", "autocast", "BF16", "lean8")]
    assert all(row.figures["tokens/s"] == pytest.approx(32e3 / row.figures["ms"]) for row in found.rows)
    assert len(found.notes) == 1 and found.notes[0].startswith("eager, nothing: HmpxError: ")
    assert gpu.short_of("train", found)[0] == found.notes[0]


def in_python(code):
    return [sys.executable, "-c", f"import pathlib, sys, time; file = pathlib.Path(sys.argv[-1]); {code}"]


@pytest.mark.parametrize(
    "code, seconds, found",
    [
        ('file.write_text(\'{"short": ["slow"]}\'); sys.exit(1)', 60, "slow"),
        ("sys.exit(3)", 60, "bench gpu host: ended with status 3"),
        ("time.sleep(60)", 1, "bench gpu host: stopped after 1 s"),
    ],
)
def test_a_part_that_fails_or_hangs_is_said_and_the_next_one_runs(code, seconds, found, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu.ALONE, "host", gpu.PARTS["host"]._replace(seconds=seconds))
    file = tmp_path / "part.json"
    file.write_text('{"short": ["of the part before"]}')
    assert gpu.apart("host", [*in_python(code), str(file)], file) == {"short": [found]}


def test_all_parts_together_take_at_most_six_minutes():
    assert sum([part.seconds for part in gpu.PARTS.values()]) <= 360


def test_each_part_writes_what_the_page_is_made_of(tmp_path, monkeypatch, capsys):
    """The parts run as they do on a GPU, each in a process of its own, here one that knows two tables."""
    monkeypatch.setattr(gpu, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu, "surroundings", lambda: {"GPU": "of paper"})
    one = Bench("title", [Line("torch", {"ratio": 1.0}), Line("hmpx fused, BF16 states", {"ratio": 0.95})])
    said = f"file.write_text({json.dumps({'table': asdict(one), 'short': ['step: slow']})!r}); sys.exit(1)"
    monkeypatch.setattr(gpu, "_COMMAND", tuple(in_python(said)))
    assert main(["gpu", "step", "models", "--folder", str(tmp_path)]) == 1
    page, whole = (tmp_path / "hmpx-gpu.md").read_text(), json.loads((tmp_path / "hmpx-gpu.json").read_text())
    assert page.startswith("# hmpx on of paper\n") and page.count("- step: slow\n") == 2
    assert [*whole["tables"]] == ["step", "models"] and f"## models\n\n```text\n{one}\n```" in page
    assert whole["tables"]["step"] == asdict(one) and "fell short: step: slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    "ratio, short",
    [
        (0.85, []),
        (0.95, ["fused AdamW with BF16 state / torch's fused FP32 step: 0.95, at most 0.90"]),
        (None, ["fused AdamW with BF16 state / torch's fused FP32 step: not measured"]),
    ],
)
def test_a_figure_that_is_larger_than_expected_or_missing_fell_short(ratio, short):
    rows = [] if ratio is None else [Line("hmpx fused, BF16 states", {"ratio": ratio})]
    assert gpu.short_of("step", Bench("title", rows)) == short


@pytest.mark.parametrize(
    "status, said, figures, notes",
    [
        (0, "....\n57 passed in 3.20s", {"passed": 57}, []),
        (1, "FAILED tests/test_cuda.py::test_a - x\n1 failed, 2 passed in 1s", {"failed": 1, "passed": 2}, 1),
        (4, "no such option -n", {}, ["pytest ended with status 4: no such option -n"]),
    ],
)
def test_tests_that_fail_are_notes(status, said, figures, notes, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], status, said, ""))
    found = gpu.tests(1, torch.device("cpu"))
    assert found.rows[0].figures == figures
    assert found.notes == (notes if notes != 1 else [said.splitlines()[0]]) == gpu.short_of("tests", found)


def test_the_rows_of_which_something_is_expected_are_in_the_tables():
    """`bench rounding`, `bench step` and `bench gpu train` call them so."""
    rows = {part: limits[0].row for part, limits in gpu.EXPECTED.items()}
    assert rows["step"] in updates._ways() and rows["rounding"] == "hmpx Triton kernel"
    assert rows["train"].removeprefix("eager, ") in gpt.RECIPES
