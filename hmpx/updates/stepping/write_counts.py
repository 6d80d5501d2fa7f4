"""Raises the versions of tensors that foreach kernels write to while a `TorchDispatchMode` is open.

By the versions of tensors a step learns what the optimizer has written to: gradients that the user shall see, and state
that cannot be taken back if the step raises. On a CPU a foreach kernel is a loop of in-place operations, each of which
raises the version of its tensor. Below a mode (`FlopCounterMode`, or one that looks for NaN) they do not.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def counted_writes() -> contextlib.AbstractContextManager:
    """Inside, foreach kernels raise versions in every mode."""
    return _CountsWrites() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


class _CountsWrites(TorchDispatchMode):
    """Raises versions that a kernel did not; also after an error, since the kernel may have written to some tensors."""

    supports_higher_order_operators = True  # of torch: let `torch.cond` and its kin pass

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        written = args[0] if _is_foreach_in_place(func) else ()
        before = [tensor._version for tensor in written]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.autograd.graph.increment_version(
                [tensor for tensor, version in zip(written, before, strict=True) if tensor._version == version]
            )


def raises_versions(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step raises the version of some state of each parameter that it steps.

    Fused kernels raise that of the count of steps, which SGD does not keep.
    """
    return type(optimizer) is not torch.optim.SGD or not any(group.get("fused") for group in optimizer.param_groups)


def _is_foreach_in_place(func: Any) -> bool:
    if not isinstance(func, torch._ops.OpOverload):
        return False
    return func._schema.is_mutable and func._schema.name.startswith("aten::_foreach")
