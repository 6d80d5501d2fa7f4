"""Casts of an operand to FP8 or FP4: codes, and scales that decode them.

**Scales.** Numbers that share a scale are divided by it, and the largest of them becomes the largest number of the
format. If one of them is inf or NaN, all of them become NaN. torch's own cast to e4m3 on a CPU turns inf into 448, and
nobody would see it.

**Four bits.** e2m1 has 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their negatives; no inf and no NaN. All are numbers of
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
from hmpx.ops.policies.fp8_format import BLOCK, CODES, Format
from hmpx.rounding.shared import Span
from hmpx.rounding.stochastic import random_numbers

Tensor = torch.Tensor
aten = torch.ops.aten


# The numbers below stand in functions, not in the module: torch.compile(dynamic=True) turns a module's numbers into
# symbols, which a subgraph does not take.


def largest_of(name: str) -> float:
    return 6.0 if name == "e2m1" else torch.finfo(CODES[name]).max


def spills_of(name: str) -> float:
    """Return the bound above which numbers round to no number of the format."""
    return {"e4m3": 464.0, "e5m2": 61439.996, "e2m1": 6.9999995}[name]


def in_parts(
    x: Tensor, name: str, form: Format, dim: int, scaling: str, weight: bool = False, site: str = ""
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the codes of `x`, and the one or two scales that decode them.

    Args:
        x: (..., M, K), floating.
        name: "e4m3", "e5m2" or "e2m1".
        dim: -1 or -2, which the product sums over.
        weight: whether blocks are square, where the format has such blocks.
        site: of what is rounded stochastically, what it is cast for.

    Returns:
        FP8 of the shape of `x`; FP32 of a shape that broadcasts to it; and where the tensor has a scale beside those of
        its blocks that one, else None.
    """
    wide = aten.to.dtype(x, torch.float32)
    dims, whole = _dims(form, scaling, weight, dim), None
    largest = aten.to.dtype(_largest(aten.abs(x), scaling, dims), torch.float32)
    if scaling == "nvfp4":
        scale, whole, factor = nvfp4_scales(largest, largest_of(name))
    else:
        factor, scale = factors(largest, name, form, scaling == "mx")
    if scaling in BLOCK:
        scale, factor = (_spread(each, x, scaling, dims) for each in (scale, factor))
    # In place wherever memory is new: new memory costs a CPU more than the computation in it.
    scaled = aten.mul(x, factor) if wide is x else aten.mul_(wide, factor)
    return encoded(scaled, name, form.saturating, site), scale, whole


def factors(largest: Tensor, name: str, form: Format, mx: bool = False) -> tuple[Tensor, Tensor]:
    """Return the factors that encode, and the scales that decode, for the largest magnitudes; in FP32."""
    if mx:
        factor = aten.exp2(aten.neg(_exponent(largest, name, form.rceil)))
    else:
        # In FP64 so that compiled code comes to the same bits.
        least = aten.to.dtype(aten.clamp_min(largest, 2.0**-110), torch.float64)  # so that the scale is finite
        factor = aten.reciprocal(aten.div(least, largest_of(name)))
        factor = aten.to.dtype(factor, torch.float32)
        if form.power_of_two:
            factor = aten.exp2(aten.sub(aten.frexp(factor)[1], 1))
    factor = aten.where(aten.isfinite(largest), factor, torch.nan)
    return factor, aten.reciprocal(factor)


def decoded(codes: Tensor, name: str, saturating: bool) -> tuple[Tensor, float]:
    """Return codes in FP32, and a factor that these numbers want beside the scale; NaN only where the scale is.

    e4m3 with its bits moved to where FP16 has exponent and mantissa is an FP16 number of 1/256 of the value. To have
    torch cast e4m3 takes a CPU ten times as long.
    """
    if name == "e5m2" or not saturating:  # which makes NaN of numbers alone
        return aten.to.dtype(codes, torch.float32), 1.0
    bits = aten.to.dtype(codes.view(torch.int8), torch.int16)
    bits = aten.bitwise_and_(aten.bitwise_left_shift_(bits, 7), ~0x4000)  # the sign was copied to there
    return aten.to.dtype(bits.view(torch.float16), torch.float32), 256.0


def _exponent(largest: Tensor, name: str, rceil: bool) -> Tensor:
    """Return the exponents of mx scales: nothing saturates, or by the OCP rule the exponent of the largest."""
    fraction, exponent = aten.frexp(aten.div(largest, largest_of(name)) if rceil else largest)
    if rceil:
        exponent = aten.sub(exponent, aten.to.dtype(aten.eq(fraction, 0.5), torch.int32))
    else:
        exponent = aten.sub(exponent, {"e4m3": 9, "e5m2": 16, "e2m1": 3}[name])
    return aten.clamp(exponent, -127, 127)


def encoded(x: Tensor, name: str, saturating: bool, site: str = "") -> Tensor:
    """Return `x`, which is overwritten, in FP8."""
    most = largest_of(name)
    if not saturating:
        over = torch.nan if name == "e4m3" else torch.inf
        spilt = aten.copysign(torch.full_like(x, over), x)
        clamped = aten.clamp(x, -most, most)
        return aten.to.dtype(aten.where(aten.gt(aten.abs(x), spills_of(name)), spilt, clamped), CODES[name])
    held = aten.clamp_(x, -most, most)
    return aten.to.dtype(to_e2m1(held, site) if name == "e2m1" else held, CODES[name])


def of_scales(x: Tensor, form: Format, dim: int, scaling: str, weight: bool) -> Tensor:
    """Return the largest number among those that share a scale, of numbers from 0 on."""
    return _largest(x, scaling, _dims(form, scaling, weight, dim))


def _dims(form: Format, scaling: str, weight: bool, dim: int) -> tuple[int, ...]:
    """Return the dimensions along which a block extends."""
    square = weight and (scaling == "blockwise" or (form.squares and scaling in BLOCK))
    return (-1, -2) if square else (dim,)


def _largest(magnitude: Tensor, scaling: str, dims: tuple[int, ...]) -> Tensor:
    """Return the largest magnitude for each scale: of all, of rows, or of each block along each of `dims`."""
    if scaling not in BLOCK:
        return aten.amax(magnitude) if scaling == "tensorwise" else aten.amax(magnitude, dims, True)
    for dim in dims:
        rows = magnitude.transpose(dim, -1)
        padded = aten.constant_pad_nd(rows, [0, -rows.shape[-1] % BLOCK[scaling]])
        magnitude = aten.amax(padded.unflatten(-1, (-1, BLOCK[scaling])), [-1]).transpose(dim, -1)
    return magnitude


def _spread(of_blocks: Tensor, x: Tensor, scaling: str, dims: tuple[int, ...]) -> Tensor:
    """Return the value of its block for each element of `x`."""
    for dim in dims:
        rows = of_blocks.transpose(dim, -1).unsqueeze(-1)
        repeated = rows.expand(*rows.shape[:-1], BLOCK[scaling]).flatten(-2)
        of_blocks = repeated[..., : x.shape[dim]].transpose(dim, -1)
    return of_blocks


# Numbers of four bits: rounding to e2m1, the two scales of NVFP4, and what makes gradients bear both


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
