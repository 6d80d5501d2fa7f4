"""Ten seconds: a small network on scikit-learn's digits, three ways to hold its weights.

Run it with ``python examples/digits.py``.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import hmpx

HELD_BACK = 400  # images


def load(side: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of 64 numbers and their labels, in one random order; with a side, images of 1 x side x side."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(images / 16, dtype=torch.float32)[order]
    if side:
        images = F.interpolate(images.view(-1, 1, 8, 8), size=side, mode="bilinear")
    return images, torch.tensor(labels)[order]


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """On the images that were held back."""
    return (model(images[-HELD_BACK:]).argmax(1) == labels[-HELD_BACK:]).float().mean().item()


def train(dtype: torch.dtype, stochastic: bool, epochs: int = 30) -> float:
    """Train, and return the accuracy."""
    images, labels = load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-4)
    for _ in range(epochs):
        for x, y in zip(images[:-HELD_BACK].to(dtype).split(64), labels[:-HELD_BACK].split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x).float(), y).backward()
            with hmpx.disable_casts() if stochastic else contextlib.nullcontext():
                optimizer.step()
    return accuracy(model, images.to(dtype), labels)


def main() -> None:
    for name, dtype, stochastic in (
        ("FP32", torch.float32, False),
        ("BF16, optimizer.step()", torch.bfloat16, False),
        ("BF16, with hmpx.disable_casts(): optimizer.step()", torch.bfloat16, True),
    ):
        print(f"{name:52} accuracy {train(dtype, stochastic):.3f}", flush=True)


if __name__ == "__main__":
    main()
