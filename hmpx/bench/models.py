"""The models that `bench train` runs: small ones of the usual kinds. Each classifies into ten classes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions around a skip connection, as in ResNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Block(nn.Module):
    """Causal attention and an MLP, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Mean(nn.Module):
    """Over the positions of a sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _mlp() -> tuple[nn.Module, Tensor]:
    hidden = (layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU()))
    return nn.Sequential(*hidden, nn.Linear(512, 10)), torch.randn(64, 512)


def _convnet() -> tuple[nn.Module, Tensor]:
    stem = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    return nn.Sequential(*stem, *(Residual(32) for _ in range(3)), *head), torch.randn(8, 3, 32, 32)


def _transformer() -> tuple[nn.Module, Tensor]:
    blocks = (Block(256, 4) for _ in range(4))
    return nn.Sequential(*blocks, nn.LayerNorm(256), Mean(), nn.Linear(256, 10)), torch.randn(4, 64, 256)


MODELS = {"mlp": _mlp, "convnet": _convnet, "transformer": _transformer}  # name -> model and a batch that it takes
