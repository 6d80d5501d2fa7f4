"""`python -m hmpx compare`."""

import json
import sys

import pytest

import hmpx
from hmpx.shell.main import main
from tests.support.planted import Model, line_of

MODULE = """\
from torch import nn
from tests.support.planted import Model, batches, loss_of, variance_by_difference

def setup():
    return Model(variance_by_difference), batches(), loss_of

def not_finite():
    model, data, loss = setup()
    return model, data, lambda model, x, y: loss(model, x, y).sub(1e3).log()

def raises():
    model, data, loss = setup()
    return model, data, lambda model, x, y: nn.functional.cross_entropy(model(x).masked_fill(y[:, None] > 2, -1e9), y)

def one_batch():
    model, data, loss = setup()
    return model, data[:1], loss
"""


@pytest.mark.parametrize(
    "what, more, status, message",
    [
        ("setup", (), 1, "keep in FP32: "),
        ("setup", ("--opt-level", "O2"), 0, "healthy at these weights: gradient error 0.0"),
        ("one_batch", ("--opt-level", "O2"), 2, "gradient errors have no unit, which is the noise between batches"),
        ("setup", ("--recipe", "autocast-cpu", "--json", "found.json"), 1, ": mul in Model: by itself gradient error"),
        ("not_finite", (), 1, "stopped: FP32 itself is not finite: the loss of batch 0 has inf or NaN, first in the"),
        (
            "raises",
            ("--low-precision", "fp16", "--list", "fp16.txt"),
            1,
            "mine.py:13: masked_fill: RuntimeError: value cannot",
        ),
    ],
)
def test_compare_runs_what_a_function_returns(what, more, status, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "fp16.txt").write_text("masked_fill\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    found = main(["compare", f"mine.py:{what}", *more])
    sys.modules.pop("mine", None)
    out, err = capsys.readouterr()
    assert found == status and message in (err if err.startswith("hmpx: ") else out + err)
    if "--json" in more:
        saved = json.loads((tmp_path / "found.json").read_text())
        first = saved["rows"][0]
        place = line_of(Model.forward, "self.first").rpartition(":")[2]
        assert first["op"] == "linear" and first["where"].endswith(f":{place}") and saved["schema"] == 3
    assert hmpx.conversion.installed() is None
