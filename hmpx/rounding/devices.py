"""What differs between devices: kernels, and operations on bits that mean one thing.

On XLA an int32 ``>>`` of a negative number is a division that rounds; `torch.bitwise_right_shift` by a 0-dim tensor is
the arithmetic shift. `Tensor.view(dtype)` is not lowered there, and ends the graph; a bitcast of XLA's own does not.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType

import torch

from hmpx.base.tensors import is_lazy, is_on_host, lacks_data
from hmpx.errors import HmpxError
from hmpx.rounding import native, triton

Tensor = torch.Tensor
_XLA_TYPES = {torch.int16: "s16", torch.int32: "s32", torch.float32: "f32", torch.bfloat16: "bf16"}


@functools.cache
def _constant(value: int, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=torch.int32, device=device)


def shifted(x: Tensor, by: int) -> Tensor:
    """Shift int32 `x` to the right, the sign coming in from the left, on any device."""
    # A tensor is cheaper than a Python number on a CPU. On a GPU it would be one more tensor to read.
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


_ALL: tuple[ModuleType, ...] = (native, triton)


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Return the kernels that can read these tensors of equal shape; None if none can."""
    if any(map(lacks_data, tensors)):
        return None
    for kernels in _ALL:
        if kernels.can_read(*tensors):
            return kernels
    return None
