"""The frameworks under a recipe that is in force from the outside, as by ``python -m hmpx run``."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import accelerate
import lightning.pytorch as pl
import pytest
import torch
import transformers

import hmpx
from hmpx.integrations.lightning import HmpxPrecision
from hmpx.integrations.transformers import HmpxCallback
from tests.downstream import trainer
from tests.downstream.by_hand import adamw, bits, loader, net
from tests.downstream.lightning_net import Net
from tests.support import python

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
MODEL = net()


def by_accelerate(tmp_path, recipe=None, **asked):
    """Make what the framework is asked for; with a recipe, in hmpx's own way for the framework."""
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.Accelerator(cpu=True, **asked)
    if recipe is not None:
        hmpx.prepare(MODEL, adamw(MODEL.parameters()), recipe)


def by_transformers(tmp_path, recipe=None, **asked):
    callbacks = [] if recipe is None else [HmpxCallback(recipe)]
    transformers.Trainer(MODEL, trainer.arguments(tmp_path, **asked), callbacks=callbacks)


def by_lightning(tmp_path, recipe=None, **asked):
    module, plugins = Net(), None if recipe is None else HmpxPrecision(recipe)
    module.net = MODEL
    made = pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, plugins=plugins, **asked)
    if recipe is not None:
        made.fit(module, loader())


def ours(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "hmpx"]


CONFLICTS = [
    (by_accelerate, {"mixed_precision": "bf16"}, "hmp-o1", "Accelerator(mixed_precision='bf16') beside a recipe"),
    (by_accelerate, {"gradient_accumulation_steps": 2}, "lean", "Accelerator(gradient_accumulation_steps=2) adds up"),
    (by_transformers, {"bf16": True}, "neuron-bf16-sr", "TrainingArguments(bf16=True) beside a recipe"),
    (by_transformers, {"bf16_full_eval": True}, "hmp-o1", "TrainingArguments(bf16_full_eval=True) beside a recipe"),
    (by_transformers, {}, "lean", "TrainingArguments(max_grad_norm=1.0) clips or measures"),
    (by_lightning, {"gradient_clip_val": 1.0}, "lean", "Trainer(gradient_clip_val=1.0) clips or measures"),
    (by_lightning, {"accumulate_grad_batches": 2}, "lean", "Trainer(accumulate_grad_batches=2) adds up"),
]
OF_LIGHTNING = (by_lightning, {"precision": "bf16-true"}, "hmp-o1", "Trainer(precision='bf16-true') beside a recipe")
UNKNOWN = [
    (by, {}, {"module_dtypes": {"nosuch": "float32"}}, "'nosuch' is the name of no module")
    for by in (by_transformers, by_lightning)
]


@pytest.mark.parametrize("made, asked, recipe, said", [*CONFLICTS, OF_LIGHTNING])
def test_a_conflict_is_said_once_under_an_activated_recipe(made, asked, recipe, said, tmp_path, caplog):
    before = [cls.__init__ for cls in (accelerate.Accelerator, transformers.Trainer, pl.Trainer)]
    with caplog.at_level(logging.WARNING, "hmpx"), hmpx.activate(recipe):
        made(tmp_path, **asked)
        made(tmp_path, **asked)
    assert [said in message for message in ours(caplog)] == [True]
    assert [cls.__init__ for cls in (accelerate.Accelerator, transformers.Trainer, pl.Trainer)] == before
    caplog.clear()
    made(tmp_path, **asked)
    assert not ours(caplog)


@pytest.mark.parametrize("made, asked, recipe, said", [*CONFLICTS, *UNKNOWN])
def test_it_is_refused_in_the_ways_of_hmpx_for_a_framework_and_nothing_is_changed(made, asked, recipe, said, tmp_path):
    before, product = bits(MODEL), torch.matmul
    with pytest.raises(hmpx.HmpxError, match=re.escape(said)):
        made(tmp_path, recipe, **asked)
    assert bits(MODEL) == before and torch.matmul is product and not MODEL._forward_hooks


FINE = [
    (by_transformers, {"gradient_accumulation_steps": 2}, "hmp-o1"),
    (by_lightning, {}, "lean"),
    (by_lightning, {"precision": "bf16-mixed"}, {"opt_level": None}),
    (by_accelerate, {"mixed_precision": "bf16"}, {"opt_level": None}),
]


@pytest.mark.parametrize("made, asked, recipe", FINE)
def test_what_goes_together_is_no_conflict(made, asked, recipe, tmp_path, caplog):
    """A recipe that leaves the ops alone may have autocast beside it."""
    with caplog.at_level(logging.WARNING, "hmpx"), hmpx.activate(recipe):
        made(tmp_path, **asked)
    assert not ours(caplog)


def test_run_says_it_on_standard_error(tmp_path):
    (tmp_path / "train.py").write_text(
        "from accelerate import Accelerator\nAccelerator(cpu=True, mixed_precision='bf16')\n"
    )
    done = python.run("-m", "hmpx", "run", "--recipe", "hmp-o1", tmp_path / "train.py")
    assert done.returncode == 0 and done.stderr.count("mixed_precision='bf16') beside a recipe") == 1, done.stderr


ALONE = """
from tests.downstream import torchvision_ops  # what torchvision asks of torch when it is imported
import hmpx, sys
assert not {"lightning", "pytorch_lightning", "transformers", "accelerate"} & set(sys.modules), "imported by hmpx"
assert not any(name.startswith("hmpx.integrations") for name in sys.modules)
import pytorch_lightning as pl, torch
from hmpx.integrations.lightning import HmpxPrecision
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
trainer = pl.Trainer(accelerator="cpu", max_steps=2, logger=False, enable_checkpointing=False,
                     plugins=HmpxPrecision("hmp-o2"))
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
assert "lightning.pytorch" not in sys.modules

import torch.nn.functional as F
gelu = F.gelu
import diffusers, lightning, timm
from accelerate import Accelerator
from diffusers import UNet2DModel
from transformers import AutoModel, Trainer
timm.create_model("resnet18")
with hmpx.convert() as handle:
    assert torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.bfloat16
    handle.escaped
assert F.gelu is gelu and torch.ones(2, 2).matmul(torch.ones(2, 2)).dtype is torch.float32
"""


def test_hmpx_imports_no_framework_and_converts_beside_all_of_them():
    """`pytorch_lightning` alone serves too."""
    python.run("-c", ALONE, cwd=ROOT, check=True)
