"""The frameworks under a recipe that does not fit, and beside hmpx."""

import logging
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import transformers

import hmpx
from hmpx.integrations.lightning import HmpxPrecision
from hmpx.integrations.transformers import HmpxCallback
from tests.downstream import trainer
from tests.downstream.by_hand import bits, loader, net
from tests.downstream.lightning_net import Net
from tests.downstream.trainers import lightning_trainer
from tests.support import python

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
MODEL = net()


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


@pytest.mark.parametrize("made", [by_transformers, by_lightning])
def test_a_wrong_recipe_is_refused_and_nothing_is_changed(made, tmp_path):
    before, product = bits(MODEL), torch.matmul
    with pytest.raises(hmpx.HmpxError, match="'nosuch' is the name of no module"):
        made(tmp_path, {"modules": {"nosuch": "float32"}})
    assert bits(MODEL) == before and torch.matmul is product and "_hmpx_rules" not in vars(MODEL)
    with hmpx.convert():  # nor is a recipe in force
        pass


def with_lightning(recipe, tmp_path):
    lightning_trainer(recipe, gradient_clip_val=1.0).fit(Net(), loader())


def with_transformers(recipe, tmp_path):
    trainer.trained(trainer.gpt2(), recipe, tmp_path, max_grad_norm=1.0)


@pytest.mark.parametrize("train", [with_lightning, with_transformers])
def test_clipping_of_released_gradients_is_an_error(train, tmp_path):
    with pytest.raises(hmpx.HmpxError, match="release_gradients=False"):
        train("lean", tmp_path)


def test_autocast_of_a_framework_beside_a_recipe_casts_nothing_of_its_own(tmp_path, caplog):
    """Where op lists cast, a region of torch.autocast is hmpx's."""
    found = []
    with caplog.at_level(logging.WARNING, "hmpx"), hmpx.activate("hmp-o1"):
        for asked in ({}, {"bf16": True}):
            found.append(bits(trainer.trained(trainer.gpt2(**trainer.NO_DROPOUT), None, tmp_path, **asked).model))
    assert found[0] == found[1] and not ours(caplog)


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
