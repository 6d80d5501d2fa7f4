"""Attached optimizers in the hands of Accelerate and Lightning."""

from __future__ import annotations

import accelerate
import lightning.pytorch
import pytest
import torch
from torch import nn, optim

import hmpx

BF16 = torch.bfloat16


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(BF16)


def _released(model):
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    hmpx.attach(optimizer, release_gradients=True)
    return optimizer


def test_a_fresh_run_under_accelerate_warns_of_nothing(caplog):
    """Its optimizer loads its own state into itself when it is made."""
    optimizer = optim.AdamW(_net().parameters(), lr=1e-2)
    hmpx.attach(optimizer, "master")
    accelerate.Accelerator(cpu=True).prepare(optimizer)
    assert "masters" not in caplog.text


def test_accelerate_clips_through_torch():
    model = _net()
    optimizer = _released(model)
    model(torch.ones(2, 4, dtype=BF16)).float().square().sum().backward()
    for clip in (accelerate.Accelerator(cpu=True).clip_grad_norm_, accelerate.Accelerator(cpu=True).clip_grad_value_):
        with pytest.raises(hmpx.HmpxError, match="release_gradients=False"):
            clip(model.parameters(), 1.0)
    optimizer.step()


def test_lightning_clips_through_torch(tmp_path):
    class Module(lightning.pytorch.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = _net()

        def training_step(self, batch, index):
            return self.net(batch).float().square().sum()

        def configure_optimizers(self):
            return _released(self.net)

    for algorithm in ("norm", "value"):
        trainer = lightning.pytorch.Trainer(
            max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            default_root_dir=tmp_path, gradient_clip_val=1.0, gradient_clip_algorithm=algorithm,
        )  # fmt: skip
        with pytest.raises(hmpx.HmpxError, match="release_gradients=False"):
            trainer.fit(Module(), torch.ones(4, 2, 4, dtype=BF16))
