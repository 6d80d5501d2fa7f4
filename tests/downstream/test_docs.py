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
ROOT = Path(hmpx.__file__).parent.parent
GUIDE = (ROOT / "examples" / "README.md").read_text()
BLOCK = re.compile(r"^```python with (\w+)\n((?s:.*?))^```$", re.MULTILINE)


MEMORY = re.findall(r"^\| [^|`]* \| `((?:\w+\.)*\w+\(.*\))` \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
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


@pytest.mark.parametrize("line", MEMORY)
def test_each_line_of_the_front_page_trains_with_8_bit_state(line, world):
    names = {"HmpxCallback": transformers.HmpxCallback, "HmpxPrecision": lightning.HmpxPrecision}
    made = eval(line, {**world, **names})
    if line.startswith("Trainer("):
        made.train()
        optimizer = made.optimizer
    elif line.startswith("pl."):
        made.fit(world["module"], world["batches"])
        (optimizer,) = made.optimizers
    else:
        model, optimizer = made
        optimizer = optimizer if hasattr(optimizer, "state") else world["optimizer"]
        tokens = torch.arange(8)[None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    optimizer = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
    held = {each.dtype for state in optimizer.state.values() for each in state.values() if each.dim() > 1}
    assert torch.int8 in held or torch.uint8 in held, held
    hmpx.restore()


def test_the_front_page_has_a_line_for_a_loop_and_two_trainers():
    assert len(MEMORY) == 3


@pytest.mark.parametrize("thing", PUBLIC)
def test_the_example_of_a_docstring_runs(thing, world):
    test = doctest.DocTestParser().get_doctest(thing.__doc__, world, thing.__name__, thing.__module__, 0)
    assert test.examples
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(test, out=said.append, clear_globs=False)
    assert not said, "".join(said)
