"""Tensors that have a shape and a dtype, and no data: a step on them gives dtypes and sizes, and asks for no value."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses import FakeTensor


def lacks_data(tensor: Tensor) -> bool:
    """Return whether a tensor is on the meta device or of a `FakeTensorMode`, and must not be kept for real steps."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def is_on_host(tensor: Tensor) -> bool:
    """Return whether it is cheap to look at a value: on a CPU, with data. On an accelerator the host would wait."""
    return tensor.is_cpu and not isinstance(tensor, FakeTensor)
