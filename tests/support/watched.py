"""Parameters of several shapes with given gradients, and optimizers that are attached, for tests that watch updates."""

from __future__ import annotations

import torch
from torch import nn, optim

import hmpx

BF16 = torch.bfloat16
WAYS = ("stochastic", "nearest", "master", "split", "split8")
SHAPES = {"long": (1000,), "matrix": (24, 40), "tall": (33, 5), "one": (1,), "scalar": ()}


class Whole(optim.SGD):
    """A class that hmpx does not know, so that it steps on a whole FP32 copy."""


class ClearsItsGradients(optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def drawn(seed):
    """Weights of many sizes, one in eight of them zero, and one zero gradient."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in SHAPES.items():
        x = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-4, 2, generator=generator)
        made[name] = torch.where(torch.rand(shape, generator=generator) < 0.125, 0.0, x).bfloat16()
    return made


def parameters(layout=lambda x: x):
    return {name: nn.Parameter(layout(weight)) for name, weight in drawn(0).items()}


def give(params, step):
    """Given gradients; what a closure returns."""
    for name, grad in drawn(100 + step).items():
        params[name].grad = (grad * 1e-2).to(params[name].dtype)
    return torch.zeros(())


def train(params, optimizer, steps=5, closure=False, after=lambda step: None):
    for step in range(steps):
        if closure:
            optimizer.step(lambda step=step: give(params, step))
        else:
            give(params, step)
            optimizer.step()
        after(step)


def attached(cls, options, params, way="stochastic", **settings):
    optimizer = cls(list(params.items()), **options)
    optimizer.attachment, optimizer.options = hmpx.attach(optimizer, way, **settings), options
    return optimizer
