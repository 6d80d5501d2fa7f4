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
    largest = aten.to.dtype(_largest(x, scaling, dim, weight), torch.float32)
    if scaling == "mx":
        exponent = _exponent(largest, name, form.rceil)
        scale, factor = aten.exp2(exponent), aten.exp2(aten.neg(exponent))
    else:
        # In FP64 so that compiled code comes to the same bits.
        factor = aten.reciprocal(aten.div(aten.to.dtype(aten.clamp_min(largest, _TINY), torch.float64), LARGEST[name]))
        factor = aten.to.dtype(factor, torch.float32)
        if form.power_of_two:
            factor = aten.exp2(aten.sub(aten.frexp(factor)[1], 1))
        scale = aten.reciprocal(factor)
    factor = aten.where(aten.isfinite(largest), factor, torch.nan)
    return _codes(aten.mul(wide, factor), name, form.saturating), scale


def _exponent(largest: Tensor, name: str, rceil: bool) -> Tensor:
    """Of the scales of mx: so that nothing saturates, or by the OCP rule, which is the exponent of the largest."""
    fraction, exponent = aten.frexp(aten.div(largest, LARGEST[name]) if rceil else largest)
    if rceil:
        exponent = aten.sub(exponent, aten.to.dtype(aten.eq(fraction, 0.5), torch.int32))
    else:
        exponent = aten.sub(exponent, 1 + _EXPONENT[name])
    return aten.clamp(exponent, -127, 127)


def _codes(x: Tensor, name: str, saturating: bool) -> Tensor:
    codes = aten.clamp(x, -LARGEST[name], LARGEST[name])
    if not saturating:
        over = torch.nan if name == "e4m3" else torch.inf
        codes = aten.where(aten.gt(aten.abs(x), SPILLS[name]), aten.copysign(torch.full_like(x, over), x), codes)
    return aten.to.dtype(codes, FP8[name])


def _largest(x: Tensor, scaling: str, dim: int, weight: bool) -> Tensor:
    """The largest magnitude among those that share a scale, in a shape that broadcasts to that of `x`."""
    magnitude = aten.abs(x)
    if scaling == "tensorwise":
        return aten.amax(magnitude)
    if scaling == "rowwise":
        return aten.amax(magnitude, [dim], True)
    for each in (-1, -2) if weight and scaling == "blockwise" else (dim,):
        magnitude = _of_blocks(magnitude, each, BLOCK[scaling])
    return magnitude


def _of_blocks(magnitude: Tensor, dim: int, block: int) -> Tensor:
    """The largest of each block of so many along a dimension, for each of its elements."""
    rows = magnitude.transpose(dim, -1)
    size = rows.shape[-1]
    padded = aten.constant_pad_nd(rows, [0, -size % block])
    largest = aten.amax(padded.unflatten(-1, (-1, block)), [-1])
    return aten.repeat_interleave(largest, block, -1)[..., :size].transpose(dim, -1)
