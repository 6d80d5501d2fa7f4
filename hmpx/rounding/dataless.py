"""Tensors that have a shape and a dtype, and no data: a step on them gives dtypes and sizes, and asks for no value."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses import FakeTensor


def lacks_data(tensor: Tensor) -> bool:
    """Whether it is on the meta device or of a `FakeTensorMode`. None may be kept for others to compute with."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
