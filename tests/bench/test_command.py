"""The command of the bench: what it refuses before it measures, and the tables that it prints and writes."""

import json

import pytest
import torch

from tests.support.bench import main, updates

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def run(capsys, *arguments):
    status = main([*arguments])
    return status, *capsys.readouterr()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("rounding", "--json", "/nowhere/at/all.json"), "there is no folder /nowhere/at"),
        (("step", "--device", "nosuch"), "device 'nosuch':"),
        *(pytest.param(("gpu", part), "bench: gpu wants a GPU", marks=no_gpu) for part in ("fp8", "host", "train")),
        (("gpu", "rounding", "steps"), "bench: gpu steps: there is no such part; there are tests, rounding, step,"),
    ],
)
def test_bench_refuses_before_it_measures(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and message in err and not out


def test_bench_prints_a_table_and_writes_it_as_json(capsys, tmp_path):
    file = tmp_path / "figures.json"
    status, out, _ = run(capsys, "rounding", "--elements", "5000", "--repeat", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert status == 0 and rows[0]["name"] == "torch copy_" and rows[0]["figures"]["ratio"] == 1.0
    assert all(row["name"] in out for row in rows) and any(row["name"] == "hmpx eager kernel" for row in rows)


def test_bench_says_what_torch_cannot_compile_here(capsys, monkeypatch):
    """Its compiler fails where torch lies on a path with a space."""

    def fails(function):
        def compiled(x):
            raise OSError("ld returned 1 exit status\nmore")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    status, out, _ = run(capsys, "rounding", "--elements", "50", "--repeat", "1")
    assert status == 0 and out.endswith("torchao, compiled: does not run here, OSError: ld returned 1 exit status\n")


def test_bench_step_has_a_table_of_ways_and_one_of_models(capsys, tmp_path, monkeypatch):
    """Of other libraries one that is quick, one that is not there, and one that fails."""
    peers = {
        "runs": ("optimi", "AdamW", {}),
        "absent": ("nowhere", "AdamW", {}),
        "fails": ("optimi", "AdamW", {"k": 1}),
    }
    monkeypatch.setattr(updates, "_PEERS", peers)
    file = tmp_path / "figures.json"
    arguments = ("--elements", "20000", "--models", "toy", "--repeat", "1", "--json", str(file))
    status, out, _ = run(capsys, "step", *arguments)
    ways, models = json.loads(file.read_text())
    assert status == 0 and "hmpx split, torch fused" in out and any(row["name"] == "hmpx fused" for row in ways["rows"])
    assert (
        "runs" in [row["name"] for row in ways["rows"]] and "\nabsent: not measured, nowhere is not installed\n" in out
    )
    assert "fails: does not run here, TypeError: " in out and len(ways["notes"]) == 2
    (toy,) = models["rows"]
    assert toy["name"] == "toy, 20 tensors, 0.01 M" and toy["figures"]["fused"] > 0 and toy["name"] in out


@pytest.mark.slow
def test_bench_sets_casts_and_models_beside_autocast(capsys, tmp_path):
    file = tmp_path / "figures.json"
    status, out, _ = run(capsys, "casts", "--repeat", "1")
    assert status == 0 and "hmpx/autocast" in out and "linear, BF16 comes" in out
    status, out, _ = run(capsys, "train", "--models", "mlp", "--eager", "--repeat", "1", "--json", str(file))
    rows = {row["name"]: row["figures"] for row in json.loads(file.read_text())["rows"]}
    assert status == 0 and len(rows) == 4 and all(name in out for name in rows)
    step, inference = rows["mlp, eager, step"], rows["mlp, eager, inference"]
    assert (
        step["hmpx/autocast"] == pytest.approx(step["hmpx ms"] / step["autocast ms"]) and "hmpx cached ms" in inference
    )
    assert step["hmpx record/hmpx"] == pytest.approx(step["hmpx record ms"] / step["hmpx ms"])
