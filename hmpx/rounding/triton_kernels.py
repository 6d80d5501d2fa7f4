"""The Triton kernels: optimizer steps of a list of parameters, and moving a list of tensors from one form to another.

The first program of each parameter stands in the table; a program looks there for its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hmpx.rounding import native
from hmpx.rounding.triton_held import ABSENT, FIRST, HEAD, HELD, closed, opened, tile_of

SCALARS = tl.constexpr(12)  # at most, of a parameter; as in `native_steps.c`
ADAM, SGD, LION, ADAGRAD, RMSPROP, NADAM = (tl.constexpr(number) for number in range(len(native.KERNELS)))


@triton.jit
def own_part(table, count, WORDS: tl.constexpr):
    """The number of the parameter that this program takes a part of, and the number of the part."""
    program = tl.program_id(0)
    low, high = program - program, count
    while low + 1 < high:
        middle = (low + high) // 2
        is_before = tl.load(table + middle * WORDS + FIRST) <= program
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle)
    return low, program - tl.load(table + low * WORDS + FIRST)


@triton.jit(do_not_specialize=["count"])
def move_list(table, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, EVERY: tl.constexpr, LIE: tl.constexpr):
    """Read tensors held in one way, and write them in another way."""
    number, part = own_part(table, count, HEAD + 2 * HELD)
    one = table + number * (HEAD + 2 * HELD)
    source, target = one + HEAD, one + HEAD + HELD
    tile = tile_of(one, part, LIE)
    x = opened(tile, source, SOURCE, EVERY, LIE)
    closed(tile, target, x, TARGET, EVERY, LIE)


@triton.jit
def stepped(KERNEL: tl.constexpr, p, x, a, b, c, s, MOMENTUM: tl.constexpr, CENTERED: tl.constexpr):
    """The loops of `native_steps.c`: weight, signed gradient with its L2 penalty, three states, the scalars."""
    if KERNEL == ADAM:
        a = tl.load(s + 3) * a + tl.load(s + 4) * x
        b = tl.load(s + 5) * b + tl.load(s + 6) * x * x
        p = tl.load(s + 2) * p - tl.load(s + 7) * tl.div_rn(a, tl.sqrt_rn(b) + tl.load(s + 8))
    elif KERNEL == SGD:
        if MOMENTUM:
            a = tl.load(s + 4) * a + tl.load(s + 5) * x
            x = tl.where(tl.load(s + 6) != 0, x + tl.load(s + 3) * a, a)
        p -= tl.load(s + 2) * x
    elif KERNEL == LION:
        u = tl.load(s + 3) * a + tl.load(s + 4) * x
        direction = tl.where(u > 0, 1.0, 0.0) - tl.where(u < 0, 1.0, 0.0)
        p = tl.load(s + 2) * p - tl.load(s + 7) * direction
        a = tl.load(s + 5) * a + tl.load(s + 6) * x
    elif KERNEL == ADAGRAD:
        a += x * x
        p -= tl.load(s + 2) * tl.div_rn(x, tl.sqrt_rn(a) + tl.load(s + 3))
    elif KERNEL == RMSPROP:
        a = tl.load(s + 3) * a + tl.load(s + 4) * x * x
        variance = a
        if CENTERED:
            c += tl.load(s + 4) * (x - c)
            variance = a - c * c
        x = tl.div_rn(x, tl.sqrt_rn(variance) + tl.load(s + 5))
        if MOMENTUM:
            b = tl.load(s + 6) * b + x
            x = b
        p -= tl.load(s + 2) * x
    else:  # NAdam
        a += tl.load(s + 3) * (x - a)
        b = tl.load(s + 4) * b + tl.load(s + 5) * x * x
        root = tl.sqrt_rn(tl.div_rn(b, tl.load(s + 9))) + tl.load(s + 8)
        p = tl.load(s + 2) * p - tl.load(s + 6) * tl.div_rn(x, root) - tl.load(s + 7) * tl.div_rn(a, root)
    return p, a, b, c


@triton.jit(do_not_specialize=["count"])
def step_list(
    table, count, scalars, KERNEL: tl.constexpr, P: tl.constexpr, G: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, EVERY: tl.constexpr, LIE: tl.constexpr,
):  # fmt: skip
    """A step of parameters whose weight, gradient and states are held in these ways."""
    number, part = own_part(table, count, HEAD + 5 * HELD)
    one = table + number * (HEAD + 5 * HELD)
    weight, state, s = one + HEAD, one + HEAD + 2 * HELD, scalars + number * SCALARS
    tile = tile_of(one, part, LIE)
    p = opened(tile, weight, P, EVERY, LIE)
    grad = opened(tile, weight + HELD, G, EVERY, LIE)
    a = opened(tile, state, A, EVERY, LIE)
    b = opened(tile, state + HELD, B, EVERY, LIE)
    c = opened(tile, state + 2 * HELD, C, EVERY, LIE)
    grad = tl.load(s) * grad + tl.load(s + 1) * p
    MOMENTUM: tl.constexpr = (A if KERNEL == SGD else B) != ABSENT
    p, a, b, c = stepped(KERNEL, p, grad, a, b, c, s, MOMENTUM, C != ABSENT)
    closed(tile, weight, p, P, EVERY, LIE)
    closed(tile, state, a, A, EVERY, LIE)
    closed(tile, state + HELD, b, B, EVERY, LIE)
    closed(tile, state + 2 * HELD, c, C, EVERY, LIE)
