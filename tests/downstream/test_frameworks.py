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
from tests.support import python

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
MODEL = net()


def by_transformers(tmp_path, recipe):
    transformers.Trainer(MODEL, trainer.arguments(tmp_path), callbacks=[HmpxCallback(recipe)])


def by_lightning(tmp_path, recipe):
    module = Net()
    module.net = MODEL
    pl.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path, plugins=HmpxPrecision(recipe)).fit(
        module, loader()
    )


@pytest.mark.parametrize("made", [by_transformers, by_lightning])
def test_a_wrong_recipe_is_refused_and_nothing_is_changed(made, tmp_path):
    before, product = bits(MODEL), torch.matmul
    with pytest.raises(hmpx.HmpxError, match="'nosuch' is the name of no module"):
        made(tmp_path, {"modules": {"nosuch": "float32"}})
    assert bits(MODEL) == before and torch.matmul is product and "_hmpx_rules" not in vars(MODEL)
    with hmpx.convert():  # nor is a recipe in force
        pass


def test_autocast_of_a_framework_beside_a_recipe_casts_nothing_of_its_own(tmp_path, caplog):
    """Where op lists cast, a region of torch.autocast is hmpx's."""
    found = []
    with caplog.at_level(logging.WARNING, "hmpx"), hmpx.activate("hmp-o1"):
        for asked in ({}, {"bf16": True}):
            found.append(bits(trainer.trained(trainer.gpt2(**trainer.NO_DROPOUT), None, tmp_path, **asked).model))
    assert found[0] == found[1] and not [record for record in caplog.records if record.name == "hmpx"]


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
