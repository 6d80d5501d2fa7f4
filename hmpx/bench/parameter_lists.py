"""The shapes of the parameters of well-known models, for `bench step`.

A step costs something for each tensor, and most tensors of a model are small: norms and biases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Shape = tuple[int, ...]


def toy() -> Iterator[Shape]:
    """An MLP of ten layers: 20 tensors, 10.6 thousand parameters."""
    for _ in range(10):
        yield from _linear(32, 32)


def resnet50() -> Iterator[Shape]:
    """ResNet-50 of He et al. (CVPR 2016): 161 tensors, 25.6 M parameters."""
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
    """BERT-base, uncased, of Devlin et al. (NAACL 2019): 199 tensors, 109.5 M parameters."""
    yield from ((30522, 768), (512, 768), (2, 768), *_norm(768))
    for _ in range(12):
        for _ in range(4):
            yield from _linear(768, 768)
        yield from (*_norm(768), *_linear(768, 3072), *_linear(3072, 768), *_norm(768))
    yield from _linear(768, 768)


def gpt2_small() -> Iterator[Shape]:
    """GPT-2 of Radford et al. (2019), the smallest one: 148 tensors, 124.4 M parameters."""
    yield from ((50257, 768), (1024, 768))
    for _ in range(12):
        yield from (*_norm(768), *_linear(768, 2304), *_linear(768, 768))
        yield from (*_norm(768), *_linear(768, 3072), *_linear(3072, 768))
    yield from _norm(768)


def _convolution(inputs: int, outputs: int, size: int) -> tuple[Shape, ...]:
    """A convolution and the norm behind it."""
    return (outputs, inputs, size, size), *_norm(outputs)


def _linear(inputs: int, outputs: int) -> tuple[Shape, ...]:
    return (outputs, inputs), (outputs,)


def _norm(width: int) -> tuple[Shape, ...]:
    return (width,), (width,)


LISTS: dict[str, Callable[[], Iterator[Shape]]] = {
    "toy": toy,
    "resnet50": resnet50,
    "bert-base": bert_base,
    "gpt2-small": gpt2_small,
}
