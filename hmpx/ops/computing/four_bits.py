"""Numbers of four bits: rounding to e2m1, the two scales of NVFP4, and what makes gradients bear both.

**The numbers.** e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives; no inf and no NaN. All are numbers of
e4m3, in whose codes they are held, and a NaN as e4m3's.

**Stochastic rounding.** Neighbours in e2m1 lie far apart, and most numbers of a gradient lie between two of them.
Rounding to nearest would move a number in the same direction at each step, and the training would follow that error. So
a number is rounded up with a probability: its distance from the lower neighbour, over the distance of both. The random
numbers are those of `hmpx.rounding.stochastic`, the same on every rank and device. Their name says for which product
the gradient is cast and how many columns it has. Their index is that of the element in the gradient. Their step counts
the gradients of this name that were cast since `convert`, because a backward pass knows no optimizer's step; a resumed
run counts from 0 again. A checkpoint that repeats a forward pass casts no gradient there.

**Random Hadamard.** One outlier takes the scale of its block and makes the others zeros. The gradient of a weight sums
over tokens. An orthogonal matrix between its two operands changes nothing, and spreads an outlier over 16 tokens.

Sources: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); torchao 0.18, `nvfp4_quantize`, for
the order of operations in scales.
"""

from __future__ import annotations

import torch

from hmpx.base import process_state
from hmpx.rounding.keys import Span
from hmpx.rounding.stochastic import random_numbers

Tensor = torch.Tensor
aten = torch.ops.aten


def to_e2m1(x: Tensor, site: str = "") -> Tensor:
    """Return the numbers of e2m1 for FP32 numbers of at most 6: the nearest, of two the even one.

    site: of a gradient that is rounded stochastically, the name of what it is cast for.
    """
    power = aten.bitwise_and(x.view(torch.int32), 0x7F800000).view(torch.float32)  # of two, the next beneath
    step = aten.mul_(aten.clamp_(power, 1.0, 4.0), 0.5)  # between neighbours: 0.5, from 2 on 1, from 4 on 2
    if not site:
        return aten.mul_(aten.round_(aten.div(x, step)), step)
    part = aten.mul_(aten.add(torch.ops.hmpx.random_numbers(x, site), 0.5), 2.0**-16)
    up = aten.floor_(aten.add_(part, aten.div(aten.abs(x), step)))
    return aten.copysign_(aten.mul_(up, step), x)


def _random_numbers(like: Tensor, site: str) -> Tensor:
    """Return a number of 16 bits for each element, others in each call.

    That is an op of its own, since a compiled program would have the first call's step in every step.
    """
    name = f"{site}, {like.shape[-1]} columns"
    rounded = process_state.gradients_rounded
    step = rounded[name] = rounded.get(name, -1) + 1
    count = like.numel()
    return random_numbers(like.reshape(-1), [Span(0, count, 0, count, 0)], (0, step, name)).view(like.shape)


if not hasattr(torch.ops.hmpx, "random_numbers"):  # an earlier import of hmpx has made it
    _ops = torch.library.Library("hmpx", "FRAGMENT")
    _ops.define(
        "random_numbers(Tensor like, str site) -> Tensor",
        tags=(torch.Tag.nondeterministic_seeded, torch.Tag.cudagraph_unsafe),
    )
    _ops.impl("random_numbers", _random_numbers, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "hmpx::random_numbers", lambda like, site: like.new_empty(like.shape, dtype=torch.int32), lib=_ops
    )


def nvfp4_scales(largest: Tensor, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales of NVFP4 for the largest magnitude of each block, and for `most` as the format's largest.

    Returns:
        The scales of blocks, numbers of e4m3 in FP32; the one of the tensor; and the factors that encode.
    """
    of_all = aten.amax(largest)
    largest = aten.where(aten.isfinite(of_all), largest, torch.nan)  # who share a scale with an inf become NaN
    whole = _ratio(aten.clamp_min(aten.amax(largest), 2.0**-110), 448 * most)  # so that the factors are finite
    scale = aten.clamp(_ratio(_ratio(largest, most), whole), 2.0**-6, 448.0)
    scale = aten.to.dtype(aten.to.dtype(scale, torch.float8_e4m3fn), torch.float32)
    return scale, whole, _ratio(_ratio(aten.ones_like(whole), whole), scale)


def _ratio(a: Tensor, b: Tensor | float) -> Tensor:
    """Return ``a / b`` in FP32, by way of FP64, so that compiled code comes to the same bits."""
    return aten.to.dtype(aten.div(aten.to.dtype(a, torch.float64), b), torch.float32)


def mixed(x: Tensor, dim: int) -> Tensor:
    """Return `x` in FP32 with each 16 along a dimension multiplied by a Hadamard matrix with random signs.

    The dimension is padded with zeros to a multiple of 16. Sums are taken in one order, the same everywhere.
    """
    rows = aten.to.dtype(x, torch.float32).transpose(dim, -1)
    blocks = aten.constant_pad_nd(rows, [0, -rows.shape[-1] % 16]).unflatten(-1, (-1, 16))
    # The low 16 bits of `derive_key(0, 0, "hadamard")`.
    signs = aten.bitwise_and(aten.bitwise_right_shift(0xCA9D, aten.arange(16, device=x.device)), 1)
    blocks = aten.mul(blocks, aten.sub(0.25, aten.mul(signs, 0.5)))  # 1/4 in all, as 16 numbers are added up
    for _ in range(4):
        even, odd = aten.unbind(blocks.unflatten(-1, (8, 2)), -1)
        blocks = aten.cat([aten.add(even, odd), aten.sub(even, odd)], -1)
    return blocks.flatten(-2).transpose(dim, -1)
