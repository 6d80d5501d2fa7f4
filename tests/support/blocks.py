"""Blocks of a transformer that tests of casts call."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-1, -2) / 3).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), Attention(), nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x * torch.sigmoid(x) + self.mlp(x)


def transformer():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 4))


def results(model, forward=None):
    """What it computes of an input that is always the same: the output, the gradient of the input, all others."""
    torch.manual_seed(2)
    x = torch.randn(2, 3, 8, requires_grad=True)
    model.zero_grad()
    out = (model if forward is None else forward)(x)
    out.backward(torch.arange(out.numel()).reshape(out.shape).to(out.dtype))
    return [out.detach(), x.grad, *(p.grad for p in model.parameters())]
