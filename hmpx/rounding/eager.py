"""The kernels in eager torch: any device, no compiler, and no look at a value on an accelerator.

On a CPU rounding goes through the cache's size at a time. On an accelerator each call costs as much as some hundred
thousand elements: there it rounds a tensor of any size in some 26 calls; XLA's compiler fuses them. XLA flushes numbers
below BF16's normal range to zero where it likes.

Steps of optimizers have the bits of `native_steps.c`: each operation is a call of its own that rounds once, so nothing
is contracted into a fused multiply-add. That is 10 to 20 passes over memory where a kernel takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hmpx.base.tensors import is_lazy, is_on_host
from hmpx.base.torch_private import copy_all, private
from hmpx.rounding.devices import reinterpreted, shifted
from hmpx.rounding.shared import SCALARS_OF

Tensor = torch.Tensor

GOLDEN, MULTIPLY_1, MULTIPLY_2 = 0x9E3779B9, 0x21F0AAAD, 0x735A2D97
BF16_MAX = torch.finfo(torch.bfloat16).max
_CHUNK = 1 << 17  # elements: few enough for the cache, enough for two threads


def signed(x: int) -> int:
    """Return the int32 with the low 32 bits of `x`."""
    x &= 0xFFFFFFFF
    return x - 2**32 if x >= 2**31 else x


def round_(out: Tensor, x: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Round float32 `x` into bfloat16 `out`: equal shapes, contiguous, within one key.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    out, x = out.view(-1), x.view(-1)
    for here, *place in _parts(x, offset, width or x.numel(), stride):
        _round_at_once(out[here], x[here], key, *place)


def numbers_(out: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Write the random numbers of `round_`, 16 bits each, to flat int32 `out`."""
    for here, *place in _parts(out, offset, width or out.numel(), stride):
        out[here].copy_(_numbers_at_once(out[here], key, *place))


def _parts(like: Tensor, offset: int, width: int, stride: int) -> Iterator[tuple[slice, int, int, int]]:
    """Yield the parts that are rounded one after the other, each with its offset, width and stride."""
    if not is_on_host(like):
        yield slice(None), offset, width, stride
        return
    for row, begin in enumerate(range(0, like.numel(), max(width, 1))):
        for column in range(0, width, _CHUNK):
            size = min(_CHUNK, width - column)
            yield slice(begin + column, begin + column + size), offset + row * stride + column, size, 0


def _round_at_once(out: Tensor, x: Tensor, key: int, offset: int, width: int, stride: int) -> None:
    """Round all in a few calls. Values past BF16's maximum get half a unit added to their bits, and inf stays inf."""
    bits, sums = reinterpreted(x, torch.int32), _numbers_at_once(x, key, offset, width, stride)
    if is_on_host(x) and torch.dot(x, x).item() < 1e38:  # no inf, no NaN, and no number past BF16's maximum
        out.view(torch.int16).copy_(sums.add_(bits).bitwise_right_shift_(16))
        return
    sums = torch.where(x.abs() <= BF16_MAX, sums, 0x8000).add_(bits)
    sums = torch.where(x.isnan(), bits | 0x400000, sums)
    out.copy_(reinterpreted(shifted(sums, 16).to(torch.int16), torch.bfloat16))


def _numbers_at_once(like: Tensor, key: int, offset: int, width: int, stride: int) -> Tensor:
    """Return the numbers of as many elements as `like` has."""
    count, odd = like.numel(), offset & 1
    if width < count:  # an element of its own for each number: pairs may begin anywhere in a row
        at = _counted(like, count, torch.int64)
        element = at.div(width, rounding_mode="floor").mul_(stride).add_(at.remainder_(width)).add_(offset)
        h = _mixed_at_once(element.div(2, rounding_mode="floor").to(torch.int32), key, key >> 32)
        return torch.where(element.remainder_(2) == 0, h, shifted(h, 16)).bitwise_and_(0xFFFF)
    pairs = (count + odd + 1) // 2
    h = _mixed_at_once(_counted(like, pairs, torch.int32), key + (offset >> 1) * GOLDEN, key >> 32)
    if is_on_host(like):  # little-endian: the low half of a number belongs to the even element
        return h.view(torch.uint16)[odd : odd + count].to(torch.int32)
    return torch.stack((h & 0xFFFF, shifted(h, 16).bitwise_and_(0xFFFF)), -1).view(-1)[odd : odd + count]


def _counted(like: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return 0 ... `count - 1` where `like` is; `out` makes it a fake tensor beside one."""
    return torch.arange(count, out=like.new_empty(count, dtype=dtype), device=like.device)


def _mixed_at_once(pairs: Tensor, k1: int, k2: int) -> Tensor:
    """Return the hashes of pairs, given their indices."""
    keys: Sequence[Any] = (signed(k1), signed(k2))  # Python numbers, since a tensor would be a copy to the device
    if is_lazy(pairs):  # and data on XLA, where one compiled graph serves every step
        keys = torch.tensor(keys, dtype=torch.int32, device=pairs.device).unbind()
    # Each mask takes away the signs that int32 shifts bring in: with them the hash would be two to one.
    h = pairs.mul_(signed(GOLDEN)).add_(keys[0])
    h = h.bitwise_xor_(shifted(h, 16).bitwise_and_(0xFFFF)).mul_(MULTIPLY_1)
    h = h.bitwise_xor_(shifted(h, 15).bitwise_and_(0x1FFFF)).bitwise_xor_(keys[1]).mul_(MULTIPLY_2)
    return h.bitwise_xor_(shifted(h, 15).bitwise_and_(0x1FFFF))


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


Numbers = Any  # its attributes are scalars by their names in `shared.SCALARS_OF`, each with a value for each tensor
States = list[Any]  # a `_TensorList` or None, in the order of `native_steps.c`


def _adam(p: _TensorList, x: _TensorList, states: States, s: Numbers) -> _TensorList:
    m, v = states[:2]
    m.becomes(m * s.beta1 + x * s.rest1)
    v.becomes(v * s.beta2 + x * s.rest2 * x)
    return p * s.decay - m / (v.sqrt() + s.eps) * s.rate


def _sgd(p: _TensorList, x: _TensorList, states: States, s: Numbers) -> _TensorList:
    b = states[0]
    if b is None:
        return p - x * s.rate
    b.becomes(b * s.keep + x * s.add)
    is_nesterov = s.nesterov[0] != 0
    return p - (x + b * s.momentum if is_nesterov else b) * s.rate


def _lion(p: _TensorList, x: _TensorList, states: States, s: Numbers) -> _TensorList:
    m = states[0]
    direction = (m * s.beta1 + x * s.rest1).sign()
    m.becomes(m * s.beta2 + x * s.rest2)
    return p * s.decay - direction * s.rate


def _adagrad(p: _TensorList, x: _TensorList, states: States, s: Numbers) -> _TensorList:
    total = states[0]
    total.becomes(total + x * x)
    return p - x / (total.sqrt() + s.eps) * s.rate


def _rmsprop(p: _TensorList, x: _TensorList, states: States, s: Numbers) -> _TensorList:
    square, b, mean = states
    square.becomes(square * s.alpha + x * s.rest * x)
    variance = square
    if mean is not None:
        mean.becomes(mean + (x - mean) * s.rest)
        variance = square - mean * mean
    moved = x / (variance.sqrt() + s.eps)
    if b is not None:
        b.becomes(b * s.momentum + moved)
        moved = b
    return p - moved * s.rate


def _nadam(p: _TensorList, x: _TensorList, states: States, s: Numbers) -> _TensorList:
    m, v = states[:2]
    m.becomes(m + (x - m) * s.rest1)
    v.becomes(v * s.beta2 + x * s.rest2 * x)
    root = v.over(s.correction).sqrt() + s.eps
    return p * s.decay - x / root * s.rate - m / root * s.rate_mean


_STEPS: dict[str, Callable[[_TensorList, _TensorList, States, Numbers], _TensorList]] = {
    "adam": _adam,
    "sgd": _sgd,
    "lion": _lion,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
    "nadam": _nadam,
}


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
        p, numbers = _TensorList(few), [list(each) for each in zip(*of_each, strict=True)]
        s = SimpleNamespace(**dict(zip(SCALARS_OF[kernel], numbers, strict=False)))
        x = _TensorList(their_grads) * s.sign
        if any(s.l2):  # 0 times an infinite weight would be NaN
            both = zip(s.l2, (x + p * s.l2).tensors, x.tensors, strict=True)
            x = _TensorList([penalised if l2 else plain for l2, penalised, plain in both])
        p.becomes(_STEPS[kernel](p, x, [None if each is None else _TensorList(each) for each in held], s))


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
