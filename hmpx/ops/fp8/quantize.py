"""The cast of a tensor to FP8: codes, and the scales that decode them.

A scale is taken from the largest magnitude of those who share it, so that this becomes the largest number of the
format. Where that is inf or NaN, all who share the scale become NaN: torch's own cast to e4m3 on a CPU makes 448 of
inf, which nobody would see.

Everything is written in aten ops, which no wrapper of a conversion stands in front of.
"""

from __future__ import annotations

import torch

from hmpx.ops.fp8.format import BLOCK, FP8, Format

Tensor = torch.Tensor
aten = torch.ops.aten
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
_EXPONENT = {"e4m3": 8, "e5m2": 15}  # of these
SPILLS = {"e4m3": 464.0, "e5m2": 61439.996}  # what is above rounds to no number of the format
_TINY = 2.0**-110  # the least magnitude that a scale is taken from, so that the scale is finite


def quantize(x: Tensor, name: str, form: Format, dim: int, scaling: str, weight: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and their scale: ``codes.float() * scale`` is what becomes of `x`.

    Args:
        x: (..., M, K), floating.
        name: "e4m3" or "e5m2".
        dim: -1 or -2, which the product sums over.
        weight: whether blocks are square.

    Returns:
        FP8 of the shape of `x`, and FP32 of a shape that broadcasts to it.
    """
    wide = aten.to.dtype(x, torch.float32)
    dims = (-1, -2) if weight and scaling == "blockwise" else (dim,)
    largest = aten.to.dtype(_largest(x, scaling, dims), torch.float32)
    if scaling == "mx":
        factor = aten.exp2(aten.neg(_exponent(largest, name, form.rceil)))
    else:
        # In FP64 so that compiled code comes to the same bits.
        factor = aten.reciprocal(aten.div(aten.to.dtype(aten.clamp_min(largest, _TINY), torch.float64), LARGEST[name]))
        factor = aten.to.dtype(factor, torch.float32)
        if form.power_of_two:
            factor = aten.exp2(aten.sub(aten.frexp(factor)[1], 1))
    factor = aten.where(aten.isfinite(largest), factor, torch.nan)
    scale = aten.reciprocal(factor)
    if scaling in BLOCK:
        scale, factor = (_spread(each, x, scaling, dims) for each in (scale, factor))
    # In place wherever memory is new: to take memory anew costs a CPU more than what is computed in it.
    scaled = aten.mul(x, factor) if wide is x else aten.mul_(wide, factor)
    return _codes(scaled, name, form.saturating), scale


def decoded(codes: Tensor, name: str, saturating: bool) -> tuple[Tensor, float]:
    """Codes in FP32, and what these numbers are to be multiplied by, beside the scale; NaN only where the scale is.

    e4m3 with its bits moved to where FP16 has exponent and mantissa is an FP16 number of 1/256 of the value. To have
    torch cast e4m3 takes a CPU ten times as long.
    """
    if name != "e4m3" or not saturating:  # which makes NaN of numbers alone
        return aten.to.dtype(codes, torch.float32), 1.0
    bits = aten.to.dtype(codes.view(torch.int8), torch.int16)
    bits = aten.bitwise_and_(aten.bitwise_left_shift_(bits, 7), ~0x4000)  # the sign was copied to there
    return aten.to.dtype(bits.view(torch.float16), torch.float32), 256.0


def _exponent(largest: Tensor, name: str, rceil: bool) -> Tensor:
    """Of the scales of mx: so that nothing saturates, or by the OCP rule, which is the exponent of the largest."""
    fraction, exponent = aten.frexp(aten.div(largest, LARGEST[name]) if rceil else largest)
    if rceil:
        exponent = aten.sub(exponent, aten.to.dtype(aten.eq(fraction, 0.5), torch.int32))
    else:
        exponent = aten.sub(exponent, 1 + _EXPONENT[name])
    return aten.clamp(exponent, -127, 127)


def _codes(x: Tensor, name: str, saturating: bool) -> Tensor:
    """`x`, which is overwritten, in FP8."""
    if not saturating:
        over = torch.nan if name == "e4m3" else torch.inf
        spilt = aten.copysign(torch.full_like(x, over), x)
        clamped = aten.clamp(x, -LARGEST[name], LARGEST[name])
        return aten.to.dtype(aten.where(aten.gt(aten.abs(x), SPILLS[name]), spilt, clamped), FP8[name])
    return aten.to.dtype(aten.clamp_(x, -LARGEST[name], LARGEST[name]), FP8[name])


def _largest(x: Tensor, scaling: str, dims: tuple[int, ...]) -> Tensor:
    """The largest magnitude of those that share a scale: of all, of rows, or of each block along each of `dims`."""
    magnitude = aten.abs(x)
    if scaling not in BLOCK:
        return aten.amax(magnitude) if scaling == "tensorwise" else aten.amax(magnitude, dims, True)
    for dim in dims:
        rows = magnitude.transpose(dim, -1)
        padded = aten.constant_pad_nd(rows, [0, -rows.shape[-1] % BLOCK[scaling]])
        magnitude = aten.amax(padded.unflatten(-1, (-1, BLOCK[scaling])), [-1]).transpose(dim, -1)
    return magnitude


def _spread(of_blocks: Tensor, x: Tensor, scaling: str, dims: tuple[int, ...]) -> Tensor:
    """For each element of `x` what its block has."""
    for dim in dims:
        rows = of_blocks.transpose(dim, -1).unsqueeze(-1)
        repeated = rows.expand(*rows.shape[:-1], BLOCK[scaling]).flatten(-2)
        of_blocks = repeated[..., : x.shape[dim]].transpose(dim, -1)
    return of_blocks
