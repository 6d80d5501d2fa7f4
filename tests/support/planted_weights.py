"""Models with a parameter that has to be held in a certain way, and why, by hand."""

from __future__ import annotations

import functools

import torch
from torch import nn

import hmpx

MAKE = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
RECIPE = {"opt_level": None}


def loss(model, *batch):
    *inputs, target = batch
    return (model(*inputs) - target).square().mean()


class Gated(nn.Module):
    """Weights of which round-to-nearest loses updates, and a gate of 64, where BF16 numbers are a half apart.

    Adam moves it by 0.001 a step: 0.002 of a unit, so that stochastic rounding moves it by a half in one step of 500.
    After 48 steps that is a random walk of sqrt(48 x 0.002) / 2 = 0.15, where FP32 has gone 0.05 at most; and a master
    of which the weight is the nearest BF16 number moves the weight by a half, or not at all.
    """

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(64, 16, generator=generator) * 0.1)
        self.head = nn.Parameter(torch.randn(16, generator=generator) * 0.25)
        self.gate = nn.Parameter(torch.tensor(64.3))

    def forward(self, x, z):
        return self.gate.float() * x + torch.tanh(z @ self.weight.float()) @ self.head.float()


def gated_batches():
    generator = torch.Generator().manual_seed(1)
    true, found = torch.randn(64, generator=generator) * 0.1, []
    for _ in range(16):
        z, x = torch.randn(32, 64, generator=generator), 1 + 0.1 * torch.randn(32, generator=generator)
        noise = 0.1 * torch.randn(32, generator=generator)
        found.append((x, z, 64.4 * x + torch.tanh(z @ true) + noise))
    return found


class Scaled(nn.Module):
    """A row of 128 weights, the first of which has gradients 3000 times as large as the others.

    State in 8 bits has one scale for the row, and its least code is above what the others' second moments are: their
    updates come out smaller. BF16 has an exponent for each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((128,), 0.013))

    def forward(self, x):
        return x @ self.weight.float()


def scaled_batches():
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(16):
        x = 1 + 0.1 * torch.randn(32, 128, generator=generator)
        x[:, 0] = 3000 * torch.randn(32, generator=generator)
        found.append((x, 0.013 * x[:, 0] + 5 + torch.randn(32, generator=generator)))
    return found


def tuned(model, batches, **options):
    options = {"recipe": RECIPE, "steps": 48, "progress": False, **options}
    return hmpx.tune_weights(model, options.pop("optimizer", MAKE), batches, loss, **options)
