"""The examples for trainers, shorter than by default: they run, show progress, and come to what they say."""

import re
import runpy
from pathlib import Path

import pytest

from tests.support import python

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run_here(monkeypatch, capsys):
    """Run an example in this process, which has imported its framework already; return what it prints."""

    def run(name, *arguments):
        monkeypatch.setattr("sys.argv", [name, *arguments])
        monkeypatch.syspath_prepend(EXAMPLES)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def run(name, *arguments):
    """What an example prints, and its progress, which goes to standard error."""
    done = python.run(EXAMPLES / name, *arguments, check=True)
    return done.stdout, done.stderr


def test_lightning_digits(run_here):
    said = run_here("lightning_digits.py", "--epochs", "8")
    fp32, under = (float(reached) for reached in re.findall(r"accuracy (0\.\d+)$", said, re.MULTILINE))
    assert fp32 > 0.5 and abs(fp32 - under) < 0.03


@pytest.mark.parametrize(
    "name, shorter, expected",
    [
        ("hf_trainer.py", ("--steps", "20"), "torch.bfloat16"),
        ("accelerate_loop.py", ("--epochs", "4"), "accuracy 0.[5-9]"),
    ],
)
def test_a_resumed_run_has_the_same_bits(name, shorter, expected, run_here):
    said = run_here(name, *shorter)
    first, again = re.findall(r"weights (\w{16})$", said, re.MULTILINE)
    assert first == again and re.search(expected, said)


def test_titan_loop():
    said, progress = run("titan_loop.py", "--steps", "30")
    assert float(re.search(r"1 rank: validation loss (\d\.\d+)", said).group(1)) < 3.5 and "step 30/30" in progress


def test_migrate_from_hmp():
    said, progress = run("migrate_from_hmp.py", "--epochs", "2", "--verbose")  # after one, by the CPU, .4 to .6
    assert float(re.search(r"two lists: accuracy (0\.\d+)", said).group(1)) > 0.5 and "batch 22/22" in progress
    assert re.search(r"conv2d.*bf16.*migrate_from_hmp.py:\d+", progress)
    assert re.search(r"log_softmax.*fp32.*migrate_from_hmp.py:\d+", progress)


@pytest.mark.slow
def test_resnet_custom_list(tmp_path):
    (tmp_path / "mine.txt").write_text("conv2d\nlinear\n")
    said, progress = run("resnet_custom_list.py", "--steps", "2", "--bf16", tmp_path / "mine.txt")
    assert re.findall(r"^(.{30}) accuracy 0\.\d{3}", said, re.MULTILINE) == [
        f"{name:30}" for name in ("FP32", "HMP's default lists", "the custom lists")
    ]
    losses = re.findall(r"^(.{30}) step   2/2  loss ([\d.]+)", progress.replace("\r", "\n"), re.MULTILINE)
    assert len({loss for _, loss in losses}) > 1
