"""Accelerate under a recipe: one line. A convolutional network on scikit-learn's digits, resumed half-way, in seconds.

``python examples/accelerate_loop.py``, or by ``accelerate launch --cpu --num_processes 2``; ``--recipe hmp-o1`` or any
other recipe or file. Gradients accumulate over two batches and are clipped. It trains without a break, then again from
what `save_state` wrote in the middle, and prints a hash of the weights of both.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path

import digits
import torch
import torch.nn.functional as F
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hmpx


def train(options: argparse.Namespace, folder: Path, resume: bool) -> None:
    """Train, and print the accuracy on images that were held back and a hash of the weights."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    images, labels = digits.load(side=8)
    training = TensorDataset(images[: -digits.HELD_BACK], labels[: -digits.HELD_BACK])
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hmpx.prepare(model, optimizer, options.recipe)  # before accelerator.prepare: DDP then takes the model as it is cast
    batches = DataLoader(training, batch_size=64, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    first, middle = 0, options.epochs // 2
    if resume:
        accelerator.load_state(str(folder))
        first = middle
    for epoch in range(first, options.epochs):
        batches.set_epoch(epoch)
        if epoch == middle and not resume:
            accelerator.save_state(str(folder))
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        line = f"\repoch {epoch + 1}/{options.epochs}{', resumed' if resume else ''}  loss {loss.item():.3f} "
        accelerator.print(line, end="", file=sys.stderr, flush=True)
    accelerator.print(file=sys.stderr)
    accuracy = digits.accuracy(model, images, labels)
    digest = hashlib.sha256()
    for p in accelerator.unwrap_model(model).parameters():
        digest.update(p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    hmpx.restore()
    if accelerator.is_main_process:
        way = "resumed half-way" if resume else "without a break"
        print(f"{options.recipe}, {way:16}: accuracy {accuracy:.3f}, weights {digest.hexdigest()[:16]}")
    accelerator.wait_for_everyone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="neuron-bf16-sr", help="a recipe's name or file; default neuron-bf16-sr")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    PartialState(cpu=True)
    with tempfile.TemporaryDirectory() as name:
        (folder,) = broadcast_object_list([name])  # that of the first rank
        train(options, Path(folder), resume=False)
        train(options, Path(folder), resume=True)


if __name__ == "__main__":
    main()
