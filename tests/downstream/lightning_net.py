"""The network of the loop by hand, as a module of Lightning."""

import lightning.pytorch as pl
from torch import nn

from tests.downstream.by_hand import adamw, net


class Net(pl.LightningModule):
    """The network of the loop by hand; `dtypes` has those of its output in each kind of step."""

    def __init__(self, configured=lambda model: adamw(model.parameters())):
        super().__init__()
        self.net, self.dtypes, self._configured = net(), {}, configured

    def _loss(self, kind, batch):
        inputs, targets = batch
        logits = self.net(inputs)
        self.dtypes[kind] = logits.dtype
        return nn.functional.cross_entropy(logits, targets)

    def training_step(self, batch, index):
        return self._loss("train", batch)

    def validation_step(self, batch, index):
        self._loss("validate", batch)

    def test_step(self, batch, index):
        self._loss("test", batch)

    def predict_step(self, batch, index):
        self._loss("predict", batch)

    def configure_optimizers(self):
        return self._configured(self)
