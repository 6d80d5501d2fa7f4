"""The steps of optimizers in torch's operators, on any device, with the bits of `native_steps.c`.

Each operation is a call of its own that rounds once, so nothing is contracted into a fused multiply-add. That is 10 to
20 passes over memory where a kernel takes one. The names of kernels and of their scalars stand here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hmpx.base.tensors import is_on_host
from hmpx.base.torch_private import copy_all, private

Tensor = torch.Tensor

_add, _sub, _mul, _div, _sqrt = (private(f"torch._foreach_{name}") for name in ("add", "sub", "mul", "div", "sqrt"))
_AT_ONCE = 1 << 15  # elements: few enough for the cache, temporaries included


class _TensorList:
    """FP32 tensors; arithmetic goes through them one by one, with as many others or as many numbers."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __add__(self, other: _TensorList | Sequence[float]) -> _TensorList:
        return _TensorList(_add(self.tensors, _operand(other)))

    def __sub__(self, other: _TensorList) -> _TensorList:
        return _TensorList(_sub(self.tensors, other.tensors))

    def __mul__(self, other: _TensorList | Sequence[float]) -> _TensorList:
        return _TensorList(_mul(self.tensors, _operand(other)))

    def __truediv__(self, other: _TensorList) -> _TensorList:
        return _TensorList(_div(self.tensors, other.tensors))

    def over(self, numbers: Sequence[float]) -> _TensorList:
        """Divide by numbers, which are tensors: CUDA multiplies with the inverse of a Python number."""
        return self / _TensorList([x.new_full((), number) for x, number in zip(self.tensors, numbers, strict=True)])

    def sqrt(self) -> _TensorList:
        """Return the roots, rounded to nearest. On CPUs, MKL's FP32 roots are not; FP64 ones, rounded to FP32, are."""
        if self.tensors[0].is_cpu:
            return _TensorList([x.double().sqrt_().to(x.dtype) for x in self.tensors])
        return _TensorList(_sqrt(self.tensors))

    def sign(self) -> _TensorList:
        """Return -1, 0 or 1; 0 for NaN."""
        return _TensorList([(x > 0).to(x.dtype).sub_((x < 0).to(x.dtype)) for x in self.tensors])

    def becomes(self, other: _TensorList) -> None:
        """Write other values to the tensors."""
        copy_all(self.tensors, other.tensors)


def _operand(other: _TensorList | Sequence[float]) -> Sequence:
    return other.tensors if isinstance(other, _TensorList) else other


# A step gets weights, their gradients with sign and L2 penalty, states in the order of `native_steps.c` (None for one
# that is not kept), and each of its scalars for each tensor. It writes the states and returns the new weights.
States = list[Any]
Numbers = Sequence[float]


def adam(
    p: _TensorList, x: _TensorList, states: States, decay: Numbers, beta1: Numbers, rest1: Numbers, beta2: Numbers,
    rest2: Numbers, rate: Numbers, eps: Numbers,
) -> _TensorList:  # fmt: skip
    m, v = states[:2]
    m.becomes(m * beta1 + x * rest1)
    v.becomes(v * beta2 + x * rest2 * x)
    return p * decay - m / (v.sqrt() + eps) * rate


def sgd(
    p: _TensorList, x: _TensorList, states: States, rate: Numbers, momentum: Numbers, keep: Numbers, add: Numbers,
    nesterov: Numbers,
) -> _TensorList:  # fmt: skip
    b = states[0]
    if b is None:
        return p - x * rate
    b.becomes(b * keep + x * add)
    return p - (x + b * momentum if nesterov[0] != 0 else b) * rate


def lion(
    p: _TensorList, x: _TensorList, states: States, decay: Numbers, beta1: Numbers, rest1: Numbers, beta2: Numbers,
    rest2: Numbers, rate: Numbers,
) -> _TensorList:  # fmt: skip
    m = states[0]
    direction = (m * beta1 + x * rest1).sign()
    m.becomes(m * beta2 + x * rest2)
    return p * decay - direction * rate


def adagrad(p: _TensorList, x: _TensorList, states: States, rate: Numbers, eps: Numbers) -> _TensorList:
    total = states[0]
    total.becomes(total + x * x)
    return p - x / (total.sqrt() + eps) * rate


def rmsprop(
    p: _TensorList, x: _TensorList, states: States, rate: Numbers, alpha: Numbers, rest: Numbers, eps: Numbers,
    momentum: Numbers, centered: Numbers,
) -> _TensorList:  # fmt: skip
    square, b, mean = states
    square.becomes(square * alpha + x * rest * x)
    variance = square
    if mean is not None:
        mean.becomes(mean + (x - mean) * rest)
        variance = square - mean * mean
    moved = x / (variance.sqrt() + eps)
    if b is not None:
        b.becomes(b * momentum + moved)
        moved = b
    return p - moved * rate


def nadam(
    p: _TensorList, x: _TensorList, states: States, decay: Numbers, rest1: Numbers, beta2: Numbers, rest2: Numbers,
    rate: Numbers, rate_mean: Numbers, eps: Numbers, correction: Numbers,
) -> _TensorList:  # fmt: skip
    m, v = states[:2]
    m.becomes(m + (x - m) * rest1)
    v.becomes(v * beta2 + x * rest2 * x)
    root = v.over(correction).sqrt() + eps
    return p * decay - x / root * rate - m / root * rate_mean


# The kernels by name. C and Triton read two scalars of each, sign and l2, and then those above in their order.
KERNELS = {step.__name__: step for step in (adam, sgd, lion, adagrad, rmsprop, nadam)}


def step_list(
    kernel: str,
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor] | None],
    scalars: Sequence[Sequence[float]],
) -> None:
    """Step FP32 tensors in place, as `native.step_list` does; under `torch.no_grad()`.

    Args:
        weights, grads: at least one, of one shape in pairs, with any strides; on one device.
        states: in the order of `native_steps.c`, the state of each weight; None for one that none of them keeps.
        scalars: of each weight; what they switch (momentum, nesterov) is the same for all.
    """
    for few, their_grads, held, of_each in _slices_of(weights, grads, states, scalars):
        p, (sign, l2, *others) = _TensorList(few), map(list, zip(*of_each, strict=True))
        x = _TensorList(their_grads) * sign
        if any(l2):  # 0 times an infinite weight would be NaN
            both = zip(l2, (x + p * l2).tensors, x.tensors, strict=True)
            x = _TensorList([penalised if each else plain for each, penalised, plain in both])
        kept = [None if each is None else _TensorList(each) for each in held]
        p.becomes(KERNELS[kernel](p, x, kept, *others))


def _slices_of(
    weights: Sequence[Tensor], grads: Sequence[Tensor], states: Sequence, scalars: Sequence
) -> Iterator[tuple]:
    """Yield the parts that are stepped one after the other: on a CPU, so small that they stay in its cache."""
    if not is_on_host(weights[0]):
        yield weights, grads, states, scalars
        return
    for i, (p, grad, own) in enumerate(zip(weights, grads, scalars, strict=True)):
        each = [p, grad, *(None if state is None else state[i] for state in states)]
        is_flat = all(x is None or x.is_contiguous() for x in each)
        for at in range(0, p.numel(), _AT_ONCE if is_flat else p.numel()):
            here = [x.view(-1)[at : at + _AT_ONCE] if is_flat and x is not None else x for x in each]
            cut = [None if x is None else [x] for x in here]
            yield cut[0], cut[1], cut[2:], [own]
