"""`python -m hmpx tune`."""

import re
import sys

import pytest

from hmpx.shell.main import main

SCRIPT = """
import torch

def setup():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    batches = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(6)]
    return model, batches, lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)

def divided():
    model, batches, loss = setup()
    return model, batches[:4], loss, batches[4:]

def narrow():
    model, batches, _ = setup()
    return model, batches, lambda model, x, y: torch.nn.functional.cross_entropy(model(x).bfloat16().float(), y)

def stopped(*given):
    raise KeyboardInterrupt

def interrupted():
    return *setup()[:2], stopped
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "mine.py").write_text(SCRIPT)
    yield
    sys.modules.pop("mine", None)


def names(path):
    return [line.partition("#")[0].strip() for line in path.read_text().splitlines() if line[:1] != "#"]


def test_it_writes_lists_that_the_other_commands_read(capsys, tmp_path):
    command = ["tune", "mine.py:setup"]
    assert main(command) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(r"tune: \d+ steps in \d+ s\n", shown.err)
    assert "100 % of the product FLOPs run in BF16" in shown.out and "linear: bfloat16  # fits" in shown.out
    files = "bf16.txt, fp32.txt, promote.txt, recipe.yaml, tuned.html, tuned.json"
    assert shown.out.splitlines()[-2] == f"hmpx: wrote tuned: {files}"
    assert main(["explain", "tuned/bf16.txt", "tuned/fp32.txt", "tuned/promote.txt", "tuned/recipe.yaml"]) == 0
    assert main(["explain", "gelu", "--recipe", "tuned/recipe.yaml"]) == 0
    assert "tuned" in capsys.readouterr().out
    before = names(tmp_path / "tuned" / "fp32.txt")
    assert main([*command, "--quiet", "--force"]) == 0 and names(tmp_path / "tuned" / "fp32.txt") == before
    assert capsys.readouterr().err == ""


def test_held_out_batches_may_be_given_and_an_error_that_stays_is_the_exit_status(capsys):
    assert main(["tune", "mine.py:divided", "--quiet", "--out", "other"]) == 0
    assert main(["tune", "mine.py:narrow", "--tolerance", "1e-4", "--quiet", "--out", "third"]) == 1
    shown = capsys.readouterr()
    assert "casts that the program makes itself, at" in shown.out and "mine.py:" in shown.out and not shown.err


def test_interrupted_it_ends_without_a_traceback_and_writes_nothing(capsys, tmp_path):
    assert main(["tune", "mine.py:interrupted", "--quiet"]) == 130
    assert "interrupted; nothing was written" in capsys.readouterr().err
    assert not [*(tmp_path / "tuned").iterdir()]
