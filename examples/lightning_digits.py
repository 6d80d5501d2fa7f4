"""Lightning under a recipe: one argument of the Trainer. A small network on scikit-learn's digits, in 20 seconds.

``python examples/lightning_digits.py``, or with ``--recipe hmp-o1``, any other recipe or file. It trains in FP32, then
under the recipe, and prints both accuracies on images that were held back.
"""

from __future__ import annotations

import argparse
import logging

import digits
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hmpx.integrations.lightning import HmpxPrecision


class Digits(pl.LightningModule):
    """It knows nothing of precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple, index: int) -> torch.Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple, index: int) -> None:
        images, labels = batch
        correct = self.layers(images).argmax(1) == labels
        self.log("accuracy", correct.float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def load() -> tuple[DataLoader, DataLoader]:
    images, labels = digits.load()
    training, held_back = TensorDataset(images[:-400], labels[:-400]), TensorDataset(images[-400:], labels[-400:])
    return DataLoader(training, batch_size=64, shuffle=True), DataLoader(held_back, batch_size=400)


def accuracy(plugins: list, epochs: int) -> float:
    pl.seed_everything(0, verbose=False)
    training, held_back = load()
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", plugins=plugins, logger=False, enable_checkpointing=False,
        enable_model_summary=False, log_every_n_steps=10,
    )  # fmt: skip
    trainer.fit(Digits(), training, held_back)
    return trainer.callback_metrics["accuracy"].item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="neuron-bf16-sr", help="a recipe's name or file; default neuron-bf16-sr")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results = {
        "FP32": accuracy([], options.epochs),
        options.recipe: accuracy([HmpxPrecision(options.recipe)], options.epochs),
    }
    for name, reached in results.items():
        print(f"{name:30} accuracy {reached:.3f}")


if __name__ == "__main__":
    main()
