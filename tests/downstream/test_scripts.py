"""Unmodified scripts of Accelerate, Lightning and transformers' Trainer under ``python -m hmpx run``."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.support import python

SCRIPTS = Path(__file__).parent / "scripts"


@functools.cache
def run(script: str, *under: str, again: bool = False) -> tuple[dict, str]:
    """What the script reports at its end, and what it wrote to standard error."""
    done = python.run(*under, SCRIPTS / script, check=True)
    report = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return json.loads(report.removeprefix("REPORT ")), done.stderr


UNDER = ("-m", "hmpx", "run", "--recipe", "neuron-bf16-sr")


def test_a_script_has_the_same_bits_again():
    assert run("with_accelerate.py", *UNDER)[0] == run("with_accelerate.py", *UNDER, again=True)[0]


@pytest.mark.parametrize(
    "script", ["with_accelerate.py", pytest.param("with_lightning.py", marks=pytest.mark.slow), "with_trainer.py"]
)
def test_a_script_trains_under_a_recipe(script):
    """BF16 weights, the losses of FP32, and no warning."""
    plain, _ = run(script)
    first, said = run(script, *UNDER)
    assert (plain["dtypes"], first["dtypes"]) == (["torch.float32"], ["torch.bfloat16"])
    assert max(abs(a - b) for a, b in zip(plain["losses"], first["losses"], strict=True)) < 0.02
    ours = [line for line in said.splitlines() if "hmpx" in line]
    assert [line for line in ours if not line.startswith("hmpx: recipe neuron-bf16-sr")] == []
