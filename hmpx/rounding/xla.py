"""The rounding kernel for XLA: one expression that its compiler fuses, in operations that mean the same everywhere.

On XLA an int32 ``>>`` of a negative number is a division that rounds; `torch.bitwise_right_shift` by a 0-dim tensor is
the arithmetic shift. `Tensor.view(dtype)` is not lowered there, and ends the graph; a bitcast of XLA's own does not.
Whatever differs from step to step comes in as data, so that one compiled graph serves every step. Nothing asks for a
value. Numbers below BF16's normal range may become zero: XLA flushes them where it likes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch

from hmpx.errors import HmpxError
from hmpx.rounding.dataless import is_on_host
from hmpx.rounding.eager import BF16_MAX, GOLDEN, MULTIPLY_1, MULTIPLY_2, signed

Tensor = torch.Tensor
_XLA_TYPES = {torch.int16: "s16", torch.int32: "s32", torch.float32: "f32", torch.bfloat16: "bf16"}


def is_lazy(tensor: Tensor) -> bool:
    """Return whether the values of `tensor` are computed later, in one graph with what comes after it."""
    return tensor.device.type in ("xla", "lazy")


@functools.cache
def _constant(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def shifted(x: Tensor, by: int) -> Tensor:
    """Shift int32 `x` to the right, the sign coming in from the left, on any device."""
    return torch.bitwise_right_shift(x, _constant(by, x.device) if is_lazy(x) or is_on_host(x) else by)


def reinterpreted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bits of `x` in another dtype of the same size: a view, or on XLA a tensor of its own."""
    return _bitcast()(x, to=_XLA_TYPES[dtype]) if x.device.type == "xla" else x.view(dtype)


@functools.cache
def _bitcast() -> Callable:
    from torch_xla.core import xla_op_registry

    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if os.environ.get(name, "0") != "0":
            raise HmpxError(
                f"{name}={os.environ[name]}: torch_xla holds FP32 tensors in BF16, and nothing is computed in FP32; "
                f"unset it and take the recipe {name.lower().replace('_', '-')}"
            )
    return xla_op_registry.register("hmpx_bitcast", lambda x, to: x.bitcast(to))


def round_(out: Tensor, x: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Do what `eager.round_` does."""
    width = width or x.numel()
    rows = zip(out.view(-1).split(width), x.view(-1).split(width), strict=True)
    for row, (out_row, x_row) in enumerate(rows):
        out_row.copy_(_rounded(x_row, key, offset + row * stride))


def numbers_(out: Tensor, key: int, offset: int, width: int = 0, stride: int = 0) -> None:
    """Do what `eager.numbers_` does."""
    for row, out_row in enumerate(out.split(width or out.numel())):
        out_row.copy_(_numbers(out_row.numel(), key, offset + row * stride, out.device))


def _numbers(count: int, key: int, offset: int, device: torch.device) -> Tensor:
    odd = offset & 1
    keys = [signed(key + (offset >> 1) * GOLDEN), signed(key >> 32)]
    k1, k2 = torch.tensor(keys, dtype=torch.int32, device=device).unbind()
    h = torch.arange((count + odd + 1) // 2, dtype=torch.int32, device=device) * signed(GOLDEN) + k1
    h = (h ^ (shifted(h, 16) & 0xFFFF)) * MULTIPLY_1
    h = (h ^ (shifted(h, 15) & 0x1FFFF) ^ k2) * MULTIPLY_2
    h = h ^ (shifted(h, 15) & 0x1FFFF)
    return torch.stack((h & 0xFFFF, shifted(h, 16) & 0xFFFF), -1).view(-1)[odd : odd + count]


def _rounded(x: Tensor, key: int, offset: int) -> Tensor:
    r = _numbers(x.numel(), key, offset, x.device)
    bits = reinterpreted(x, torch.int32)
    quiet = shifted(bits, 16).to(torch.int16) | 0x40  # of a NaN
    nearest = reinterpreted(x.to(torch.bfloat16), torch.int16)
    number = torch.where(x.abs() <= BF16_MAX, shifted(bits + r, 16).to(torch.int16), nearest)
    return reinterpreted(torch.where(x.isnan(), quiet, number), torch.bfloat16)
