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


def load() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def train(dtype: torch.dtype, stochastic: bool, epochs: int = 30) -> float:
    """Train and return the accuracy on the last 400 images."""
    images, labels = load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-4)
    for _ in range(epochs):
        for x, y in zip(images[:-400].to(dtype).split(64), labels[:-400].split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x).float(), y).backward()
            with hmpx.disable_casts() if stochastic else contextlib.nullcontext():
                optimizer.step()
    with torch.no_grad():
        return (model(images[-400:].to(dtype)).argmax(1) == labels[-400:]).float().mean().item()


def main() -> None:
    for name, dtype, stochastic in (
        ("FP32", torch.float32, False),
        ("BF16, optimizer.step()", torch.bfloat16, False),
        ("BF16, with hmpx.disable_casts(): optimizer.step()", torch.bfloat16, True),
    ):
        print(f"{name:52} accuracy {train(dtype, stochastic):.3f}", flush=True)


if __name__ == "__main__":
    main()
