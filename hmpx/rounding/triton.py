"""The kernels in Triton: CUDA, one pass over memory.

Triton comes with torch's CUDA builds. ``TRITON_INTERPRET=1`` runs the kernels on the CPU, which is how they are tested
where there is no GPU.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_PAIRS = 512  # pairs of elements that a program takes; one hash serves both elements of a pair


def available() -> bool:
    """Whether Triton can be imported."""
    return triton is not None


def round_(out: torch.Tensor, x: torch.Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """`out` bfloat16 and `x` float32: of one shape, contiguous, on one CUDA device, within one key.

    Rows of `width` elements (0: a single row) begin `stride` elements apart in the parameter.
    """
    width = width or x.numel()
    programs = triton.cdiv(width // 2 + 1, _PAIRS)  # for a row, which may begin at an odd element
    _launch(_round, x.numel() // width * programs, x, out, programs, width, stride, offset, *_halves(key))


def adam(weight, grad, mean, square, *scalars: float) -> None:
    """A step of Adam or AdamW in place; as `native.adam`."""
    p = weight[0]
    keys = (half for each in (weight, mean, square) for half in _halves(each[1]))
    _launch(
        _adam, triton.cdiv((p.numel() + 1) // 2, _PAIRS), p, grad[0], mean[0], square[0], p.numel(), *keys, *scalars
    )


def sgd(weight, grad, buffer, *scalars: float) -> None:
    """A step of SGD in place; as `native.sgd`."""
    p = weight[0]
    keys = (half for each in (weight, buffer) for half in _halves(each[1]))
    sign, l2, momentum, keep, add, nesterov, rate = scalars
    held = p if buffer[0] is None else buffer[0]
    flags = (momentum >= 0.0, bool(nesterov))
    count = p.numel()
    programs = triton.cdiv((count + 1) // 2, _PAIRS)
    _launch(_sgd, programs, p, grad[0], held, count, *keys, sign, l2, momentum, keep, add, rate, *flags)


def _halves(key: int) -> tuple[int, int]:
    return key & 0xFFFFFFFF, key >> 32


def _launch(kernel, programs: int, first: torch.Tensor, *arguments) -> None:
    with torch.cuda.device_of(first):
        kernel[(programs,)](first, *arguments, PAIRS=_PAIRS)


if triton is not None:
    _KEYS = [
        "count",
        "programs",
        "width",
        "stride",
        "offset",
        "k1",
        "k2",
        "m1",
        "m2",
        "v1",
        "v2",
        "b1",
        "b2",
    ]  # vary from call to call

    @triton.jit
    def _mixed(pair, k1, k2):
        h = pair.to(tl.uint32) * 0x9E3779B9 + k1.to(tl.uint32)
        h ^= h >> 16
        h *= 0x21F0AAAD
        h ^= h >> 15
        h ^= k2.to(tl.uint32)
        h *= 0x735A2D97
        return h ^ (h >> 15)

    @triton.jit
    def _rounded(x, pair, k1, k2):
        """FP32 [pairs, 2] to BF16."""
        bits = x.to(tl.uint32, bitcast=True)
        half = (16 * tl.arange(0, 2)).to(tl.uint32)
        r = (_mixed(pair, k1, k2)[:, None] >> half[None, :]) & 0xFFFF
        magnitude = bits & 0x7FFFFFFF
        even = bits + 0x7FFF + ((bits >> 16) & 1)
        nearest = tl.where(magnitude <= 0x7F800000, even, bits | 0x400000)  # a NaN stays one, made quiet
        upper = tl.where(magnitude <= 0x7F7F0000, bits + r, nearest) >> 16
        return upper.to(tl.uint16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def _pair(PAIRS: tl.constexpr):
        return tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)

    @triton.jit
    def _kept(x, like, pair, k1, k2):
        """`x` in the dtype of a pointer, by stochastic rounding if that is BF16."""
        if like.dtype.element_ty == tl.bfloat16:
            return _rounded(x, pair, k1, k2)
        else:
            return x

    @triton.jit(do_not_specialize=_KEYS)
    def _round(x, out, programs, width, stride, offset, k1, k2, PAIRS: tl.constexpr):
        row = (tl.program_id(0) // programs).to(tl.int64)
        first = offset.to(tl.int64) + row * stride  # element of the parameter
        pair = (tl.program_id(0) % programs).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        column = 2 * pair[:, None] + tl.arange(0, 2)[None, :] - (first & 1)
        inside = (column >= 0) & (column < width)
        values = tl.load(x + row * width + column, mask=inside, other=0.0)
        tl.store(out + row * width + column, _rounded(values, pair + (first >> 1), k1, k2), mask=inside)

    @triton.jit(do_not_specialize=_KEYS)
    def _adam(
        p, g, m, v, count, k1, k2, m1, m2, v1, v2,
        sign, decay, l2, beta1, rest1, beta2, rest2, rate, eps, PAIRS: tl.constexpr,
    ):  # fmt: skip
        pair = _pair(PAIRS)
        element = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
        inside = element < count
        weight = tl.load(p + element, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(m + element, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(v + element, mask=inside, other=0.0).to(tl.float32)
        grad = sign * tl.load(g + element, mask=inside, other=0.0).to(tl.float32) + l2 * weight
        mean = beta1 * mean + rest1 * grad
        square = beta2 * square + rest2 * grad * grad
        weight = decay * weight - rate * (mean / (tl.sqrt(square) + eps))
        tl.store(p + element, _kept(weight, p, pair, k1, k2), mask=inside)
        tl.store(m + element, _kept(mean, m, pair, m1, m2), mask=inside)
        tl.store(v + element, _kept(square, v, pair, v1, v2), mask=inside)

    @triton.jit(do_not_specialize=_KEYS)
    def _sgd(
        p, g, b, count, k1, k2, b1, b2,
        sign, l2, momentum, keep, add, rate, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, PAIRS: tl.constexpr,
    ):  # fmt: skip
        pair = _pair(PAIRS)
        element = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
        inside = element < count
        weight = tl.load(p + element, mask=inside, other=0.0).to(tl.float32)
        grad = sign * tl.load(g + element, mask=inside, other=0.0).to(tl.float32) + l2 * weight
        if MOMENTUM:
            buffer = keep * tl.load(b + element, mask=inside, other=0.0).to(tl.float32) + add * grad
            tl.store(b + element, _kept(buffer, b, pair, b1, b2), mask=inside)
            if NESTEROV:
                grad += momentum * buffer
            else:
                grad = buffer
        tl.store(p + element, _kept(weight - rate * grad, p, pair, k1, k2), mask=inside)
