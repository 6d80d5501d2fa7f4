"""A script for Habana's HMP, with one import changed: the MNIST hello_world of its Model-References, in half a minute.

``python examples/migrate_from_hmp.py``. The network, its two op lists, the optimizer and the schedule are those of the
hello_world; the digits are scikit-learn's, on a field of 28 x 28, so that nothing is downloaded. ``--plain`` trains
without HMP, ``--verbose`` shows each decision about an op, as ``hmp.convert(isVerbose=True)`` did.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import HELD_BACK, accuracy, load
from torch import nn
from torch.optim.lr_scheduler import StepLR

from hmpx import hmp  # was: from habana_frameworks.torch.hpex import hmp

HERE = Path(__file__).parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(64 * 11 * 11, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 3, 2)).flatten(1)
        x = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return F.log_softmax(x, dim=1)


def train(epochs: int, uses_hmp: bool) -> float:
    """The accuracy on digits that were held back."""
    torch.manual_seed(1)
    images, labels = load(side=28)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    batches = list(zip(images[:-HELD_BACK].split(64), labels[:-HELD_BACK].split(64), strict=True))
    for epoch in range(1, epochs + 1):
        model.train()
        for i, (data, target) in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            with hmp.disable_casts() if uses_hmp else contextlib.nullcontext():
                optimizer.step()
            progress = f"\repoch {epoch}/{epochs}  batch {i:2}/{len(batches)}  loss {loss.item():.3f} "
            print(progress, end="", file=sys.stderr, flush=True)
        scheduler.step()
    print(file=sys.stderr)
    return accuracy(model.eval(), images, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="FP32, without HMP")
    parser.add_argument("--verbose", action="store_true", help="log each decision about an op")
    options = parser.parse_args()
    if options.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.plain:
        hmp.convert(
            opt_level="O1",
            bf16_file_path=str(HERE / "ops_bf16_mnist.txt"),
            fp32_file_path=str(HERE / "ops_fp32_mnist.txt"),
            isVerbose=options.verbose,
        )
    name = "FP32" if options.plain else "HMP O1 with its two lists"
    print(f"{name}: accuracy {train(options.epochs, not options.plain):.3f}")


if __name__ == "__main__":
    main()
