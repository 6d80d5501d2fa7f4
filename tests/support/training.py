"""Named parameters and gradients that several tests train with, the same for every dtype."""

from __future__ import annotations

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
