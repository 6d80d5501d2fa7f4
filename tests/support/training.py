"""Named parameters and gradients that several tests train with, the same for every dtype."""

import pytest
import torch
from torch import nn

needs_grad_dtype = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.13")


def parameters(dtype=torch.bfloat16, sizes=((8, 6), (5, 7), (11,))):
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(size, generator=generator).bfloat16() for size in sizes]
    return [(f"layer{i}.weight", nn.Parameter(w.to(dtype))) for i, w in enumerate(weights)]


def set_gradients(named, step):
    generator = torch.Generator().manual_seed(100 + step)
    for _, p in named:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)


def train(named, optimizer, start, stop):
    for step in range(start, stop):
        set_gradients(named, step)
        optimizer.step()


def weights(named):
    return [p.detach().clone() for _, p in named]


def masters_in(optimizer):
    return [state["hmpx_master"] for _, state in sorted(optimizer.state_dict()["state"].items())]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.down.weight.data.mul_(2)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) + self.up.weight.sum()


def parameter(*shape, value=1.0, dtype=torch.bfloat16):
    return nn.Parameter(torch.full(shape, value, dtype=dtype))


def step_by(optimizer, gradient=1.0):
    """One step with a gradient of one number for all."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = torch.full_like(p, gradient)
    optimizer.step()
