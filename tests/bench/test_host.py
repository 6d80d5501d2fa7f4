"""`bench host`: what a step costs the host, without a GPU, and which rows exceed their limits."""

import importlib.util
import json
import math

import pytest
import torch

from tests.support import python
from tests.support.bench import Bench, Line, host, models
from tests.support.fresh_python import ROOT

HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(torch.cuda.is_available() or not HAS_TRITON, reason="a GPU is there, or Triton is not")
def test_without_a_gpu_steps_are_measured_and_nothing_is_launched(tmp_path):
    """In a process of its own, as Triton is told of a GPU that is not there.

    One launch steps all tensors; where matrices are in codes and vectors are not, one steps each kind.
    """
    file = tmp_path / "host.json"
    command = ["examples/bench/__main__.py", "host", "--tensors", "8", "9", "--repeat", "2", "--json", file]
    done = python.run(*command, "--only", "fused, stochastic, f", cwd=ROOT)
    table = json.loads(file.read_text())
    rows = {row["name"]: row["figures"] for row in table["rows"]}
    names = [f"{n} tensors, fused, stochastic, {state} state" for n in (8, 9) for state in ("float32", "fp8")]
    assert [*rows] == names, done.stderr
    assert not table["notes"] and done.returncode == 0
    for name, figures in rows.items():
        assert figures["launches"] == (2 if "fp8" in name else 1)
        assert figures["us/tensor"] == figures["us"] / int(name[0])
        assert figures["ratio"] == pytest.approx(figures["us"] / figures["torch us"])


def test_steps_of_an_unknown_class_are_kept_on_the_cpu_that_is_there():
    """A silent fall to steps that make all copies anew would take many times as long."""
    for way in [way for way in host.ways() if way.unknown]:
        stepped = host.Stepped(way, 3, torch.device("cpu"))
        with stepped:
            for number in range(4):
                stepped.step(number)
            assert stepped.optimizer._hmpx_attachment._updates.kept_steps == 3, way.name


def test_a_row_over_its_limit_is_said_and_so_is_one_that_failed():
    way = next(way for way in host.ways() if way.limits is host.FP32_STATE)
    over, under = {"ratio": 1.11, "device ratio": 0.9}, {"ratio": 1.09, "device ratio": 0.69}
    names = [f"{count} tensors, {way.name}" for count in (293, 1000)]
    rows = [Line(names[0], over), Line(names[1], under), Line("20 tensors, nobody", over)]
    assert host.exceeded(Bench("", rows, ["20 tensors, x: no"])) == [
        "20 tensors, x: no",
        f"{names[0]}: ratio 1.11, at most 1.10",
        f"{names[0]}: device ratio 0.90, at most 0.70",
    ]
    assert host.exceeded(Bench("", [Line(names[1], over)])) == [f"{names[1]}: ratio 1.11, at most 1.10"]


def test_every_way_to_hold_weights_and_state_has_a_row():
    names = [way.name for way in host.ways()]
    assert len(set(names)) == len(names) and len([name for name in names if name.startswith("fused")]) == 13
    limits = {at_most for way in host.ways() for _, at_most, _ in way.limits}
    assert limits == {0.7, 1.1, 1.4, 1.6, 2.0, 2.5, 4.0, 25.0, 60.0}


def test_the_model_is_a_gpt_of_406_million_parameters():
    shapes = list(models.gpt())
    assert len(shapes) == 293 and sum(map(math.prod, shapes)) == 406_382_592
    assert [len(host.gpt_of(count)) for count in host.TENSORS] == [*host.TENSORS]
