"""Chooses the kernels for a tensor: C on a CPU, Triton on CUDA.

Each is a module with the functions `can_read` and `start`, and with the names of the steps, `KERNELS`; `calls` has what
they are asked for.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from hmpx.rounding import native, triton
from hmpx.rounding.devices import lacks_data

_ALL: tuple[ModuleType, ...] = (native, triton)


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Return the kernels that can read these tensors of equal shape; None if none can."""
    if any(map(lacks_data, tensors)):
        return None
    for kernels in _ALL:
        if kernels.can_read(*tensors):
            return kernels
    return None
