"""Dtypes by name: ``"bf16"``, ``"bfloat16"`` and ``"torch.bfloat16"`` all mean `torch.bfloat16`."""

from __future__ import annotations

from typing import Any

import torch

SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_named(value: Any) -> Any:
    """The dtype that a string names; any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    found = getattr(torch, SHORT.get(name, name), None)
    return found if isinstance(found, torch.dtype) else value


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch.": ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
