"""The kernels in Triton, as Python calls them: CUDA, one pass over memory, one launch for a list of tensors.

They take what the C kernels take, and round to the same bits. Triton comes with torch's CUDA builds.
``TRITON_INTERPRET=1`` runs the kernels on the CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from hmpx.rounding import native
from hmpx.rounding.native import is_plain

KERNELS = native.KERNELS


@functools.cache
def _imported() -> ModuleType | None:
    """Import the kernels when they are first asked for; None if there is no Triton."""
    try:
        from hmpx.rounding import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def available() -> bool:
    return _imported() is not None


def can_read(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels exist and can read these tensors of equal shape."""
    device, shape = tensors[0].device, tensors[0].shape
    on_one = device.type == "cuda" and all(t.device == device and t.shape == shape for t in tensors)
    return on_one and available() and all(map(is_plain, tensors))


# Triton looks at each argument of a call, and makes a text of them to find what it has compiled: that takes longer than
# the launch. What it has compiled can be launched itself.
_compiled: dict[tuple[Any, ...], Any] = {}


def start(
    kernel: str, grid: tuple[int, int, int], args: tuple[Any, ...], constants: tuple[int, ...]
) -> Callable[..., object] | None:
    """Launch a kernel once. Its table begins at a multiple of 16 bytes, for which it is compiled.

    Returns:
        What launches it again, with arguments and constants; None in the interpreter.
    """
    known = kernel, args[0].device, constants, args[1] is None
    compiled = _compiled.get(known)
    if compiled is not None:
        compiled[grid](*args, *constants)
        return compiled[grid]
    kernels = _imported()
    assert kernels is not None, "a table is for them"
    options = {"enable_fp_fusion": False, "num_warps": kernels.WARPS[constants[-1]]}
    compiled = getattr(kernels, kernel)[grid](*args, *constants, **options)
    if compiled is None:
        return None
    _compiled[known] = compiled
    return compiled[grid]
