"""What is measured: small models, and the shapes of the parameters of well-known ones.

`bench train` and others run the small models, which classify into ten classes. `bench step` steps parameters of the
known shapes: a step costs something for each tensor, and most tensors of a model are small, norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

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


class Gpt(nn.Module):
    """Blocks between embeddings and a head that is not tied; gives the loss."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        for each in self.modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                nn.init.normal_(each.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


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

Shape = tuple[int, ...]


def toy() -> Iterator[Shape]:
    """Yield the shapes of an MLP of ten layers: 20 tensors, 10.6 thousand parameters."""
    for _ in range(10):
        yield from _linear(32, 32)


def resnet50() -> Iterator[Shape]:
    """Yield the shapes of ResNet-50 of He et al. (CVPR 2016): 161 tensors, 25.6 M parameters."""
    yield from _convolution(3, 64, 7)
    width = 64
    for inner, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield from _convolution(width, inner, 1)
            yield from _convolution(inner, inner, 3)
            yield from _convolution(inner, 4 * inner, 1)
            if block == 0:  # the skip connection gets another width
                yield from _convolution(width, 4 * inner, 1)
            width = 4 * inner
    yield from _linear(width, 1000)


def bert_base() -> Iterator[Shape]:
    """Yield the shapes of BERT-base, uncased, of Devlin et al. (NAACL 2019): 199 tensors, 109.5 M parameters."""
    yield from ((30522, 768), (512, 768), (2, 768), *_norm(768))
    for _ in range(12):
        for _ in range(4):
            yield from _linear(768, 768)
        yield from (*_norm(768), *_linear(768, 3072), *_linear(3072, 768), *_norm(768))
    yield from _linear(768, 768)


def gpt(width: int = 1024, layers: int = 24, words: int = 50304, length: int = 1024) -> list[Shape]:
    """Return the shapes of a `Gpt`: 293 tensors, 406.4 M parameters."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in Gpt(width, layers, words, length).parameters()]


def gpt2_small() -> list[Shape]:
    """Return the shapes of the smallest GPT-2 of Radford et al. (2019): 148 tensors, 124.4 M parameters."""
    return gpt(768, 12, 50257)[:-1]  # its head is tied


def _convolution(inputs: int, outputs: int, size: int) -> tuple[Shape, ...]:
    """Return the shapes of a convolution and the norm behind it."""
    return (outputs, inputs, size, size), *_norm(outputs)


def _linear(inputs: int, outputs: int) -> tuple[Shape, ...]:
    return (outputs, inputs), (outputs,)


def _norm(width: int) -> tuple[Shape, ...]:
    return (width,), (width,)


LISTS: dict[str, Callable[[], Iterable[Shape]]] = {
    "toy": toy,
    "resnet50": resnet50,
    "bert-base": bert_base,
    "gpt2-small": gpt2_small,
}
