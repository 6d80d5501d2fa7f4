"""The kernels in Triton: CUDA, one pass over memory.

Triton comes with torch's CUDA builds. ``TRITON_INTERPRET=1`` runs the kernels on the CPU, which is how they are tested
where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from hmpx.rounding.keys import key_of
from hmpx.rounding.native import Stepped

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

KERNELS = ("adam", "sgd", "lion", "adagrad", "rmsprop", "nadam")
_STATES, _SCALARS = 3, 12  # at most, of a parameter; as in `native_steps.c`
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


def step_list(kernel: str, stepped: Sequence[Stepped], step_key: int) -> None:
    """Step all of these parameters in place by one of `KERNELS`; as `native.step_list`.

    One launch for those that have the same dtypes, which are nearly always all of them.
    """
    by_dtypes: dict[tuple, list[Stepped]] = {}
    for each in stepped:
        states = cast(tuple[torch.Tensor | None, ...], each.states)  # codes of 8 bits go to the C kernels
        held = (each.weight, each.grad, *states, *(None,) * (_STATES - len(states)))
        by_dtypes.setdefault(tuple([None if t is None else t.dtype for t in held]), []).append(each)
    for dtypes, alike in by_dtypes.items():
        _launch_list(kernel, alike, dtypes, step_key)


def _launch_list(kernel: str, stepped: list[Stepped], dtypes: tuple, step_key: int) -> None:
    """A table tells each program of which parameter it takes which part."""
    words, owners, scalars = [], [], []
    for number, (weight, name, grad, states, names, own, _) in enumerate(stepped):
        programs = triton.cdiv((weight.numel() + 1) // 2, _PAIRS)
        owners += [[number, program] for program in range(programs)]
        addresses = [0 if state is None else cast(torch.Tensor, state).data_ptr() for state in states]
        keys = [half for each in (name, *names) for half in _halves(key_of(step_key, each))]
        missing = _STATES - len(states)
        row = [weight.numel(), weight.data_ptr(), grad.data_ptr(), *addresses, *(0,) * missing]
        words.append([*row, *keys, *(0,) * (2 * missing)])
        scalars.append([*own, *(0.0,) * (_SCALARS - len(own))])
    if not owners:
        return
    first = stepped[0].weight
    table, places = (torch.tensor(rows, dtype=torch.int64, device=first.device) for rows in (words, owners))
    numbers = torch.tensor(scalars, dtype=torch.float32, device=first.device)
    kinds = [_KINDS[dtype] for dtype in dtypes]
    with torch.cuda.device_of(first):
        _step_list[(len(owners),)](table, places, numbers, KERNELS.index(kernel), *kinds, PAIRS=_PAIRS)


def _halves(key: int) -> tuple[int, int]:
    return key & 0xFFFFFFFF, key >> 32


def _launch(kernel, programs: int, first: torch.Tensor, *arguments) -> None:
    with torch.cuda.device_of(first):
        kernel[(programs,)](first, *arguments, PAIRS=_PAIRS)


if triton is not None:
    _KEYS = ["programs", "width", "stride", "offset", "k1", "k2"]  # vary from call to call

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

    @triton.jit(do_not_specialize=_KEYS)
    def _round(x, out, programs, width, stride, offset, k1, k2, PAIRS: tl.constexpr):
        row = (tl.program_id(0) // programs).to(tl.int64)
        first = offset.to(tl.int64) + row * stride  # element of the parameter
        pair = (tl.program_id(0) % programs).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
        column = 2 * pair[:, None] + tl.arange(0, 2)[None, :] - (first & 1)
        inside = (column >= 0) & (column < width)
        values = tl.load(x + row * width + column, mask=inside, other=0.0)
        tl.store(out + row * width + column, _rounded(values, pair + (first >> 1), k1, k2), mask=inside)

    _KINDS = {None: None, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
    _WIDTH = tl.constexpr(3 + _STATES + 2 * (1 + _STATES))  # words of a parameter in the table
    _FIRST_KEY = tl.constexpr(3 + _STATES)
    _SCALARS_WIDE = tl.constexpr(_SCALARS)
    _ADAM, _SGD, _LION, _ADAGRAD, _RMSPROP, _NADAM = (tl.constexpr(number) for number in range(len(KERNELS)))

    @triton.jit
    def _opened(row, place: tl.constexpr, KIND: tl.constexpr, element, inside):
        """A tensor's elements in FP32; zeros where there is none."""
        if KIND is None:
            return tl.full(element.shape, 0.0, tl.float32)
        else:
            at = tl.load(row + place).to(tl.pointer_type(KIND))
            return tl.load(at + element, mask=inside, other=0.0).to(tl.float32)

    @triton.jit
    def _closed(row, place: tl.constexpr, key: tl.constexpr, KIND: tl.constexpr, element, inside, pair, x):
        """Write FP32 `x` to a tensor, by stochastic rounding if that is BF16."""
        if KIND is not None:
            at = tl.load(row + place).to(tl.pointer_type(KIND))
            if tl.bfloat16 == KIND:
                k1, k2 = tl.load(row + _FIRST_KEY + 2 * key), tl.load(row + _FIRST_KEY + 2 * key + 1)
                tl.store(at + element, _rounded(x, pair, k1, k2), mask=inside)
            else:
                tl.store(at + element, x, mask=inside)

    @triton.jit
    def _stepped(KERNEL: tl.constexpr, p, x, a, b, c, s, MOMENTUM: tl.constexpr, CENTERED: tl.constexpr):
        """The loops of `native_steps.c`: weight, signed gradient with its L2 penalty, three states, the scalars."""
        if KERNEL == _ADAM:
            a = tl.load(s + 3) * a + tl.load(s + 4) * x
            b = tl.load(s + 5) * b + tl.load(s + 6) * x * x
            p = tl.load(s + 2) * p - tl.load(s + 7) * (a / (tl.sqrt(b) + tl.load(s + 8)))
        elif KERNEL == _SGD:
            if MOMENTUM:
                a = tl.load(s + 4) * a + tl.load(s + 5) * x
                x = tl.where(tl.load(s + 6) != 0, x + tl.load(s + 3) * a, a)
            p -= tl.load(s + 2) * x
        elif KERNEL == _LION:
            u = tl.load(s + 3) * a + tl.load(s + 4) * x
            direction = tl.where(u > 0, 1.0, 0.0) - tl.where(u < 0, 1.0, 0.0)
            p = tl.load(s + 2) * p - tl.load(s + 7) * direction
            a = tl.load(s + 5) * a + tl.load(s + 6) * x
        elif KERNEL == _ADAGRAD:
            a += x * x
            p -= tl.load(s + 2) * (x / (tl.sqrt(a) + tl.load(s + 3)))
        elif KERNEL == _RMSPROP:
            a = tl.load(s + 3) * a + tl.load(s + 4) * x * x
            variance = a
            if CENTERED:
                c += tl.load(s + 4) * (x - c)
                variance = a - c * c
            x /= tl.sqrt(variance) + tl.load(s + 5)
            if MOMENTUM:
                b = tl.load(s + 6) * b + x
                x = b
            p -= tl.load(s + 2) * x
        else:  # NAdam
            a += tl.load(s + 3) * (x - a)
            b = tl.load(s + 4) * b + tl.load(s + 5) * x * x
            root = tl.sqrt(b / tl.load(s + 9)) + tl.load(s + 8)
            p = tl.load(s + 2) * p - tl.load(s + 6) * (x / root) - tl.load(s + 7) * (a / root)
        return p, a, b, c

    @triton.jit
    def _step_list(
        table, owners, scalars, KERNEL: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
        A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    ):  # fmt: skip
        number, part = tl.load(owners + 2 * tl.program_id(0)), tl.load(owners + 2 * tl.program_id(0) + 1)
        row, s = table + number * _WIDTH, scalars + number * _SCALARS_WIDE
        pair = part * PAIRS + tl.arange(0, PAIRS)
        element = 2 * pair[:, None] + tl.arange(0, 2)[None, :]
        inside = element < tl.load(row)
        p, grad = _opened(row, 1, P, element, inside), _opened(row, 2, G, element, inside)
        a, b = _opened(row, 3, A, element, inside), _opened(row, 4, B, element, inside)
        c = _opened(row, 5, C, element, inside)
        grad = tl.load(s) * grad + tl.load(s + 1) * p
        MOMENTUM: tl.constexpr = (A if KERNEL == _SGD else B) is not None
        p, a, b, c = _stepped(KERNEL, p, grad, a, b, c, s, MOMENTUM, C is not None)
        _closed(row, 1, 0, P, element, inside, pair, p)
        _closed(row, 3, 1, A, element, inside, pair, a)
        _closed(row, 4, 2, B, element, inside, pair, b)
        _closed(row, 5, 3, C, element, inside, pair, c)
