"""What it means that results are the same: `torch.testing.assert_close` without a tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def same(found: Any, expected: Any) -> bool:
    """Whether tensors, or collections of them, have the same shapes, dtypes and numbers; what differs is printed."""
    both = [each if isinstance(each, Mapping | torch.Tensor) else [*each] for each in (found, expected)]
    try:
        torch.testing.assert_close(*both, rtol=0, atol=0)
    except AssertionError as error:
        print(error)  # pytest shows it with the test that fails
        return False
    return True
