"""Chooses the kernels for a tensor: C on a CPU, Triton on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from hmpx.rounding import native, triton
from hmpx.rounding.dataless import lacks_data


class RoundingKernels(Protocol):
    """The functions that both have; `native` documents each."""

    @property
    def KERNELS(self) -> tuple[str, ...]: ...

    def can_read(self, *tensors: Tensor) -> bool: ...

    def round_list(self, roundings: Sequence[native.Rounding], step_key: int) -> None: ...

    @property
    def encode_8bit(self) -> Callable[..., None]: ...

    def decode_8bit(self, codes: Tensor, scales: Tensor, out: Tensor, rows: Sequence[int], start: int) -> None: ...

    def read(self, held: native.StoredTensor) -> Tensor: ...

    def step_list(self, kernel: str, stepped: Sequence[native.StepArguments], step_key: int) -> None: ...


_ALL: tuple[RoundingKernels, ...] = (native, triton)


def kernels_for(*tensors: Tensor) -> RoundingKernels | None:
    """Return the kernels that can read these tensors of equal shape; None if none can."""
    if any(map(lacks_data, tensors)):
        return None
    for kernels in _ALL:
        if kernels.can_read(*tensors):
            return kernels
    return None
