"""A model that the default lists break, the lists that `hmpx.tune` finds for it, and what it learns under each.

``python examples/tune_lists.py`` takes half a minute. The model classifies scikit-learn's images of digits; it
normalizes with a variance computed as a difference of two large numbers, of which BF16 leaves nothing. The lists, a
recipe and a page go to the folder ``tuned``, or to that of ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hmpx

try:
    from examples import digits
except ImportError:  # run as a script
    import digits


class Normalized(nn.Module):
    """A layer whose outputs are normalized by E[x^2] - E[x]^2, far from zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + 40
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return F.relu((x - mean) * torch.rsqrt(variance.abs() + 1e-3))


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Normalized(64, 64), Normalized(64, 64), nn.Linear(64, 10))


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def train(name: str, recipe: hmpx.Recipe | dict | None, steps: int, data: tuple[Tensor, Tensor]) -> float:
    """The accuracy on images that were held back."""
    images, labels = data
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    with hmpx.activate(recipe) if recipe else contextlib.nullcontext():
        for step in range(1, steps + 1):
            chosen = torch.randint(len(labels) - digits.HELD_BACK, (64,), generator=generator)
            optimizer.zero_grad()
            loss = loss_of(model, images[chosen], labels[chosen])
            loss.backward()
            optimizer.step()
            if step % 20 == 0:
                print(f"\r{name:16} step {step}/{steps}, loss {loss.item():.3f} ", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        return digits.accuracy(model, images, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="tuned", metavar="FOLDER")
    options = parser.parse_args()
    images, labels = data = digits.load()
    batches = [(images[i : i + 64], labels[i : i + 64]) for i in range(0, 12 * 64, 64)]

    tuned = hmpx.tune(new_model(), batches, loss_of)
    tuned.save(options.out)
    print(tuned)
    print()
    ways = {"FP32": None, "default lists": {"parameter_dtype": "float32"}, "tuned lists": tuned.recipe}
    for name, recipe in ways.items():
        print(f"{name:16} accuracy {train(name, recipe, options.steps, data):.3f}", flush=True)


if __name__ == "__main__":
    main()
