"""Lets hmpx step CPU tensors as it steps CUDA tensors, on a machine without a GPU: all of the host's work, no device.

Real: hmpx, torch's optimizers, Triton's dispatch, whose kernels are compiled for sm_90. Not there: launches, and
torch's fused kernel with its increment of counts on the device. Nothing is computed and few tensors are written, so
that most of a model's memory is never touched.

These names of hmpx are replaced, and no others. Where one has moved, `mock` raises, so that nothing is measured wrong:

=================================  ==========================================================================
``native.can_read``                no: a tensor is on no CPU
``triton.can_read``                as it is, but for tensors on a CPU
``plan.room_size``                 that of an accelerator
``transfers._memory``              that of a GPU of 80 GiB
``Waiting.ELEMENTS``               that of an accelerator
``optimizer_classes._PUBLISHERS``  with this package: what stands in torch's place here is taken for torch's
=================================  ==========================================================================
"""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor

from hmpx.base.torch_private import add_to_all
from hmpx.errors import HmpxError
from hmpx.rounding import native, triton
from hmpx.updates.stepping import optimizer_classes, plan, released, transfers

_adam = importlib.import_module("torch.optim.adam")  # `torch.optim` has removed the name


_TOLD = Counter[str]()  # one for all uses: Triton keeps a compiled kernel, and with it the driver of its first launch


def _driver() -> Any:
    """Return a driver of Triton that says it drives an H100, and launches nothing."""
    from triton.backends.compiler import GPUTarget

    def launch(*_: Any) -> None:
        _TOLD["launches"] += 1

    utils = SimpleNamespace(
        load_binary=lambda *_: (object(), 1, 32, 0, 1024),
        unload_module=lambda module: None,
        get_device_properties=lambda _: {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32},
        launch=launch,
    )
    return SimpleNamespace(
        utils=utils,
        launcher_cls=lambda source, metadata: launch,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        set_current_device=lambda device: None,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_device_capability=lambda device: (9, 0),
    )


def _can_read(*tensors: torch.Tensor) -> bool:
    shape = tensors[0].shape
    return all([each.is_cpu and each.shape == shape for each in tensors]) and all(map(native.is_plain, tensors))


class _TorchsStep:
    """torch's fused kernel on empty tensors: its arguments are read, and nothing is computed."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._empty = kernel, dict[tuple[object, ...], list[list[torch.Tensor]]]()

    def __call__(self, *lists: list[torch.Tensor], **options: Any) -> None:
        known = type(lists[0][0]), *map(len, lists)
        if known not in self._empty:
            self._empty[known] = [[_empty(each) for each in tensors] for tensors in lists]
        self._kernel(*self._empty[known], **options)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without elements, of the same class; of a count of steps, another one."""
    if isinstance(tensor, DTensor):
        return DTensor.from_local(torch.empty(0), tensor.device_mesh, tensor.placements, run_check=False)
    return torch.empty(0 if tensor.dim() else ())


@contextlib.contextmanager
def no_gpu() -> Iterator[Counter[str]]:
    """Inside, hmpx takes a CPU for a GPU; yields how many ``launches`` of its kernels there were in this process.

    Raises:
        HmpxError: Triton is not installed.
    """
    if not triton.available():
        raise HmpxError("host wants Triton where there is no GPU: pip install triton")
    from triton.runtime import driver

    inside = [False]
    own_step, add = _adam._fused_adam, add_to_all

    def room_size(elements: int, device: object = None, **options: bool) -> int:
        return transfers.room_size(elements, torch.device("cuda"), **options)

    def fused_adam(*args: Any, **kwargs: Any) -> None:
        inside[0] = True
        try:
            own_step(*args, **kwargs)
        finally:
            inside[0] = False

    def foreach_add_(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if not inside[0]:  # else counts that are on the device
            add(tensors, *args, **kwargs)

    replaced = [
        (driver, "_active", _driver()),
        (native, "can_read", lambda *tensors: False),
        (triton, "can_read", _can_read),
        (plan, "room_size", room_size),
        (transfers, "_memory", lambda device: 80 << 30),
        (released.Waiting, "ELEMENTS", released.Waiting.ELEMENTS_OF_ACCELERATORS),
        (_adam, "_fused_adam", fused_adam),
        (torch, "_foreach_add_", foreach_add_),
        (torch, "_fused_adamw_", _TorchsStep(torch._fused_adamw_)),
        (torch, "_fused_adam_", _TorchsStep(torch._fused_adam_)),
        (optimizer_classes, "_PUBLISHERS", optimizer_classes._PUBLISHERS | {"bench"}),
        (torch, "zeros_like", torch.empty_like),  # state, of which no page is ever touched
    ]
    with contextlib.ExitStack() as patches:
        for owner, name, value in replaced:
            patches.enter_context(mock.patch.object(owner, name, value))
        yield _TOLD
