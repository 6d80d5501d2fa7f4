"""The examples for trainers, shorter than by default: they run, show progress, and come to what they say."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support import python

ROOT = Path(__file__).parents[2]
# `scripts` has what torchvision asks of torch when it is imported.
RUN = """
import sys, runpy
sys.path[:0] = {paths}
import torch, torchvision_ops
torch.set_num_threads(1)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
""".format(paths=[str(ROOT / "tests" / "downstream" / "scripts"), str(ROOT / "examples")])


def run(name, *arguments):
    """What an example prints, and what it wrote to standard error, where progress goes."""
    as_a_users = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = python.run("-c", RUN, ROOT / "examples" / name, *arguments, env=as_a_users)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def hashes(said):
    return re.findall(r"weights (\w{16})$", said, re.MULTILINE)


def test_lightning_digits():
    said, _ = run("lightning_digits.py", "--epochs", "8")
    fp32, under = (float(reached) for reached in re.findall(r"accuracy (0\.\d+)$", said, re.MULTILINE))
    assert fp32 > 0.5 and abs(fp32 - under) < 0.03 and "Epoch 7/7" in said


def test_hf_trainer_resumes_with_the_same_bits():
    said, progress = run("hf_trainer.py", "--steps", "20")
    assert len(hashes(said)) == 2 and len(set(hashes(said))) == 1
    assert "torch.bfloat16" in said and "20/20" in progress


def test_accelerate_loop_resumes_with_the_same_bits():
    said, progress = run("accelerate_loop.py", "--epochs", "4")
    assert len(hashes(said)) == 2 and len(set(hashes(said))) == 1 and "epoch 4/4, resumed" in progress
    assert float(re.search(r"accuracy (0\.\d+)", said).group(1)) > 0.5


def test_titan_loop():
    said, progress = run("titan_loop.py", "--steps", "30")
    assert float(re.search(r"1 rank: validation loss (\d\.\d+)", said).group(1)) < 3.5 and "step 30/30" in progress


def test_migrate_from_hmp():
    said, progress = run("migrate_from_hmp.py", "--epochs", "1", "--verbose")
    assert float(re.search(r"two lists: accuracy (0\.\d+)", said).group(1)) > 0.5 and "batch 22/22" in progress
    assert re.search(r"conv2d.*bf16.*migrate_from_hmp.py:\d+", progress)
    assert re.search(r"log_softmax.*fp32.*migrate_from_hmp.py:\d+", progress)


def test_resnet_custom_list(tmp_path):
    (tmp_path / "mine.txt").write_text("conv2d\nlinear\n")
    said, progress = run("resnet_custom_list.py", "--steps", "2", "--bf16", tmp_path / "mine.txt")
    assert re.findall(r"^(.{30}) accuracy 0\.\d{3}", said, re.MULTILINE) == [
        f"{name:30}" for name in ("FP32", "HMP's default lists", "the custom lists")
    ]
    losses = re.findall(r"^(.{30}) step   2/2  loss ([\d.]+)", progress.replace("\r", "\n"), re.MULTILINE)
    assert len({loss for _, loss in losses}) > 1
