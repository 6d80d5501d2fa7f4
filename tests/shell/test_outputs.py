"""What a command writes replaces no file, unless it is asked to."""

import os
import sys

import pytest
import torch

import hmpx
from hmpx.recipes.reading import read_recipe
from hmpx.shell.main import main
from tests.support import python

SCRIPT = """
import torch
from torch import nn
def setup():
    model = nn.Linear(4, 4)
    return model, [(torch.randn(8, 4),) for _ in range(4)], lambda model, x: model(x).square().mean()
"""
COMMANDS = [
    "doctor --fix FILE train.py",
    "doctor --html FILE train.py",
    "doctor --json FILE train.py",
    "record --recipe mine.yaml --html FILE train.py",
    "record --recipe mine.yaml --json FILE train.py",
    "report log.json --html FILE",
    "compare train.py:setup --json FILE",
    "compare train.py:setup --html FILE",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mine.yaml").write_text(str(read_recipe("hmp-o1")))
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "log.json").write_text('{\n "schema": 1')
    os.link("train.py", "hard.py")
    os.symlink("train.py", "soft.py")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_there_is_not_written_over(command, here, capsys):
    files = {path: path.read_bytes() for path in here.iterdir()}
    for name in ("train.py", "hard.py", "soft.py", "notes.md"):
        assert main(command.replace("FILE", name).split()) == 2, name
        said = capsys.readouterr()
        assert "is there already" in said.err and name in said.err and "--force" in said.err and not said.out
    assert {path: path.read_bytes() for path in here.iterdir()} == files


REMOVES = """
import shutil, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
shutil.rmtree("out")
"""


@pytest.mark.parametrize(
    "command",
    [
        "doctor --html out/a train.py",
        "record --recipe mine.yaml --json out/a train.py",
        "record --recipe mine.yaml --hash out/a train.py",
        "compare train.py:setup --json out/a",
    ],
)
def test_what_could_not_be_written_at_the_end_is_an_exit_status(command, here):
    """The script has removed the folder; nothing else is wrong with it."""
    (here / "out").mkdir()
    (here / "train.py").write_text(REMOVES + SCRIPT)
    done = python.run("-m", "hmpx", *command.split(), cwd=here, env=python.environment())
    assert done.returncode == 2 and "out" in done.stderr and not (here / "out").exists(), done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "doctor --files weights.pt --json /dev/full",
        "report --html /dev/full log.json",
        "compare train.py:setup --html /dev/full",
    ],
)
def test_a_disk_that_is_full_is_an_exit_status(command, here, capsys):
    torch.save({"weight": torch.randn(4, 4)}, here / "weights.pt")
    with hmpx.convert(), hmpx.record() as log:
        torch.ones(2, 2) @ torch.ones(2, 2)
    log.json("log.json")
    assert main(command.split()) == 2
    assert "/dev/full: could not be written" in "".join(capsys.readouterr())


@pytest.mark.parametrize("said, status", [('"no data"', 1), ("3", 3), ("0", 2)])
def test_doctor_ends_with_the_status_of_a_script_that_ends_itself(said, status, here):
    """Of one that ends well it has looked at nothing."""
    (here / "ends.py").write_text(f"import sys\nsys.exit({said})\n")
    done = python.run("-m", "hmpx", "doctor", "ends.py", cwd=here, env=python.environment())
    assert done.returncode == status and ("no data" in done.stderr) == (status == 1), done.stderr


def test_tune_writes_no_list_over_one_of_the_users(here, capsys):
    (here / "bf16.txt").write_text("linear\n")
    assert main("tune train.py:setup --out .".split()) == 2
    assert "bf16.txt: is there already" in capsys.readouterr().err
    assert (here / "bf16.txt").read_text() == "linear\n"


def test_force_writes_over_anything_and_an_empty_file_is_none(here, capsys):
    (here / "tuned").mkdir()
    written = [here / name for name in ("tuned/bf16.txt", "tuned/tuned.json", "c.json", "c.html")]
    for path in written:
        path.write_text("old")
    (here / "empty").touch()
    for command in (
        "tune train.py:setup --quiet --out tuned --force",
        "compare train.py:setup --json c.json --html c.html --force",
        "compare train.py:setup --json /dev/null --html empty",
    ):
        assert main(command.split()) in (0, 1), capsys.readouterr().err
    assert not [path for path in written if path.read_text() == "old"] and (here / "empty").stat().st_size
