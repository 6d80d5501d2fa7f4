"""Casts of an operand to FP8 or FP4: codes, and scales that decode them.

**Scales.** Numbers that share a scale are divided by it, and the largest of them becomes the largest number of the
format. If one of them is inf or NaN, all of them become NaN. torch's own cast to e4m3 on a CPU turns inf into 448, and
nobody would see it.
"""

from __future__ import annotations

import torch

from hmpx.ops.computing.four_bits import nvfp4_scales, to_e2m1
from hmpx.ops.policies.fp8_format import BLOCK, CODES, Format

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
        site: of what is rounded stochastically, see `four_bits`.

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
