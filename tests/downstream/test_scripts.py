"""Unmodified scripts of Accelerate, Lightning and transformers' Trainer under ``python -m hmpx run``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import python

SCRIPTS = Path(__file__).parent / "scripts"


def run(script: str, *under: str) -> tuple[dict, str]:
    """What the script reports at its end, and what it wrote to standard error."""
    done = python.run(*under, SCRIPTS / script, check=True)
    report = next(line for line in done.stdout.splitlines() if line.startswith("REPORT "))
    return json.loads(report.removeprefix("REPORT ")), done.stderr


@pytest.mark.parametrize(
    "script", ["with_accelerate.py", pytest.param("with_lightning.py", marks=pytest.mark.slow), "with_trainer.py"]
)
def test_a_script_trains_under_a_recipe(script):
    """BF16 weights, the losses of FP32, no warning, and the same bits again."""
    plain, _ = run(script)
    first, said = run(script, "-m", "hmpx", "run", "--recipe", "neuron-bf16-sr")
    again, _ = run(script, "-m", "hmpx", "run", "--recipe", "neuron-bf16-sr")
    assert (plain["dtypes"], first["dtypes"]) == (["torch.float32"], ["torch.bfloat16"])
    assert first == again
    assert max(abs(a - b) for a, b in zip(plain["losses"], first["losses"], strict=True)) < 0.02
    ours = [line for line in said.splitlines() if "hmpx" in line]
    assert [line for line in ours if not line.startswith("hmpx: recipe neuron-bf16-sr")] == []
