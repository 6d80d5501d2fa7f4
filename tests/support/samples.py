"""PyTorch's own samples of its own ops."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


@functools.cache
def database() -> list:
    """Every op of PyTorch's own tests. To import it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return op_db


def samples(op: Any, dtype: torch.dtype, most: int) -> list:
    """The first samples of an op, on CPU; none where the database fails to make them."""
    try:
        return _first(op.sample_inputs, most, dtype)
    except Exception:
        return []


def error_samples(op: Any) -> list:
    """Those that must fail; none for most ops."""
    return _first(op.error_inputs, None) if op.error_inputs_func else []


def _first(make: Callable, most: int | None, *arguments: torch.dtype) -> list:
    # For each sample, torch looks through the source of all its callers for the name of a test: minutes in all.
    with mock.patch.object(inspect, "stack", return_value=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(itertools.islice(make("cpu", *arguments), most))
