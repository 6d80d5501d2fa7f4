"""What the guide shows of trainers runs as it stands there, and so do the examples in docstrings."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import accelerate
import lightning.pytorch as pl
import pytest
import torch
from transformers import Trainer

import hmpx
from hmpx.integrations import lightning, transformers
from tests.downstream.by_hand import adamw, loader
from tests.downstream.lightning_net import Net
from tests.downstream.trainer import arguments, gpt2, texts

pytestmark = pytest.mark.filterwarnings("ignore")
GUIDE = (Path(hmpx.__file__).parent.parent / "examples" / "README.md").read_text()
BLOCK = re.compile(r"^```python with (\w+)\n((?s:.*?))^```$", re.MULTILINE)


PUBLIC = [getattr(module, name) for module in (lightning, transformers) for name in module.__all__]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """What a training script has in hand."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bf16.txt").write_text("linear\n")
    (tmp_path / "fp32.txt").write_text("cross_entropy\n")
    accelerate.state.AcceleratorState._reset_state(True)
    of_trainer = {"Trainer": Trainer, "model": gpt2(), "arguments": arguments(tmp_path, max_steps=2), "texts": texts()}
    of_accelerate = {"Accelerator": accelerate.Accelerator, "optimizer": adamw(of_trainer["model"].parameters())}
    return {"torch": torch, "hmpx": hmpx, "pl": pl, "module": Net(), "batches": loader(), **of_trainer, **of_accelerate}


@pytest.mark.parametrize("framework", sorted({framework for framework, _ in BLOCK.findall(GUIDE)}))
def test_the_lines_of_the_guide_run(framework, world):
    for found, block in BLOCK.findall(GUIDE):
        if found == framework:
            exec(compile(block, "train.py", "exec"), world)


@pytest.mark.parametrize("thing", PUBLIC)
def test_the_example_of_a_docstring_runs(thing, world):
    test = doctest.DocTestParser().get_doctest(thing.__doc__, world, thing.__name__, thing.__module__, 0)
    assert test.examples
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
