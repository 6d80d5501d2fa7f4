"""What a step tells an accelerator, counted on the meta device, where nothing is computed.

On an accelerator a call costs about as much as some hundred thousand elements, and a look at a value stops everything.
So what can be counted without one is: calls of torch's operators that compute or copy on the device, launches of the
Triton kernels, values that the host waits for, bytes that are read and written, and the bytes of a step at its peak.

A call on meta tensors can give no value, so a step of ours that asked for one would fail there.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import optimizer

from hmpx.base.torch_private import DISPATCH, TorchDispatchMode, tree_leaves
from hmpx.rounding import devices, native, triton
from hmpx.rounding.state_codes import STATE_CODES
from hmpx.rounding.table import Launch, Table, TableRow
from hmpx.updates.attach import attach
from hmpx.updates.holding.state_forms import STATE_FORMS, StateDtype
from hmpx.updates.holding.stores import WAYS, Weights

Tensor = torch.Tensor
BF16 = torch.bfloat16
_TENSORS, _ROW = 32, 4096
_SILENT = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "set_", "resize_"}
_ONLY_WRITTEN = {"copy_", "_foreach_copy_", "arange", "fill_", "zero_"}

WAYS_OF_A_STEP: list[tuple[Weights, StateDtype]] = [
    *((weights, dtype) for dtype in STATE_FORMS for weights in ("stochastic", "split8")),
    *((weights, torch.float32) for weights in ("nearest", "master", "split")),
]


class Told(TorchDispatchMode):
    """Counts, while it is active, what an accelerator would be told of meta tensors.

    Attributes:
        calls, launches: of torch's operators, and of the Triton kernels.
        syncs: values that the host asks for.
        moved: bytes that are read and written.
        peak: bytes of tensors that are made, at most at a time; `live`: those that are there now.
    """

    def __init__(self) -> None:
        DISPATCH.require()
        super().__init__()
        self.calls = self.launches = self.syncs = self.moved = self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        here = [each for each in given if each.is_meta]
        if here and name in ("_local_scalar_dense", "is_nonzero", "nonzero"):
            self.syncs += 1
        stored = {each.untyped_storage()._cdata for each in here}
        out = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.is_meta]
        if here and any(not each.is_meta for each in tree_leaves(out) if isinstance(each, Tensor)):
            self.syncs += 1  # a copy to the host
        self._allocated([each for each in made if each.untyped_storage()._cdata not in stored])
        if (here or made) and not func.is_view and name not in _SILENT:
            self.calls += 1
            self.moved += _moved(name, args, here, made)
        return out

    def _allocated(self, tensors: list[Tensor]) -> None:
        for storage in (each.untyped_storage() for each in tensors):
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, size: int) -> None:
        self.live -= size

    def added(self, table: Table, kernel: str, rows: list[TableRow], constants: tuple[int, ...]) -> Launch:
        """Remember how many bytes a launch moves; this stands in the place of `Table._add`."""
        launch, moved = _ADD(table, kernel, rows, constants), 0
        for row in rows:
            sides = row.tensors if kernel == "move_list" else (*row.tensors, row.tensors[0], *row.tensors[2:])
            moved += round(sum([row.layout.size * bytes_of(held.kind) for held in sides if held is not None]))
        _BYTES[launch] = moved
        return launch

    def launch(self, launch: Launch) -> None:
        """Count a launch; this stands in the place of `Launch.run`."""
        self.launches += 1
        self.moved += _BYTES[launch]


_ADD = Table._add
_BYTES: weakref.WeakKeyDictionary[Launch, int] = weakref.WeakKeyDictionary()  # that each launch moves


def _moved(name: str, args: Any, here: list[Tensor], made: list[Tensor]) -> int:
    """Count the bytes that a call reads and writes. A call in place reads there too, unless it copies or fills."""
    if name.startswith("_fused"):
        targets = tree_leaves((args[0], args[2:4]))  # gradients, the second list, are read alone
    else:
        targets = tree_leaves(args[0]) if name.endswith("_") else made
    written = [each for each in targets if isinstance(each, Tensor)]
    read = [each for each in here if name not in _ONLY_WRITTEN or not any(each is other for other in written)]
    return sum([each.numel() * each.element_size() for each in (*read, *written)])


def bytes_of(kind: int) -> float:
    """Return bytes an element of a tensor of a kind of the kernels, with what is beside it."""
    stores = {cls.kind: 2 + cls.bytes_beside for cls in WAYS.values()}
    forms: dict[int | None, StateDtype] = {native.FP32: torch.float32, native.BF16: BF16}
    forms |= {code.kind: name for name, code in STATE_CODES.items()}
    return stores[kind] if kind in stores else STATE_FORMS[forms[kind]].bytes_each


@contextlib.contextmanager
def counted(*, by_kernels: bool, calls: bool = True) -> Iterator[Told]:
    """Count what is told inside, by the Triton kernels or without; unless `calls`, which take long, launches alone."""
    told = Told()
    with contextlib.ExitStack() as patches:
        # Not in the module of Adam: its step would no longer be the one that it came with.
        patches.enter_context(mock.patch.object(optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta"]))
        if by_kernels:
            patches.enter_context(mock.patch.object(devices, "lacks_data", _lacks_data))
            patches.enter_context(mock.patch.object(triton, "can_read", _can_read))
            patches.enter_context(mock.patch.object(native, "is_plain", Tensor.is_contiguous))
            patches.enter_context(mock.patch.object(Table, "_add", lambda *args: told.added(*args)))
            patches.enter_context(mock.patch.object(Launch, "run", lambda launch: told.launch(launch)))
        yield patches.enter_context(told) if calls else told


def _lacks_data(tensor: Tensor) -> bool:
    """Say no to who chooses kernels alone; whoever would look at values hears the truth."""
    return tensor.is_meta and sys._getframe(1).f_code is not devices.kernels_for.__code__


def _can_read(*tensors: Tensor) -> bool:
    shape = tensors[0].shape
    return all([each.is_meta and each.is_contiguous() and each.shape == shape for each in tensors])


def step_of(elements: int, how: str, weights: Weights | None, state_dtype: StateDtype, *, by_kernels: bool) -> Told:
    """Count the second step of AdamW; the first step makes the state.

    Args:
        how: ``"foreach"`` or ``"fused"``, torch's; ``"hmpx"``, the fused kernel of hmpx.
        weights: None for FP32 weights and torch's own step.
    """
    dtype = torch.float32 if weights is None else BF16
    params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes(elements)]
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-4, foreach=True)
    if how == "fused":  # whose constructor refuses meta tensors, unlike the kernel
        for group in (optimizer.defaults, *optimizer.param_groups):
            group.update(fused=True, foreach=False)
    if weights is not None:
        names = [str(i) for i in range(len(params))]
        attach(optimizer, weights, names=names, state_dtype=state_dtype, fused=how == "hmpx")
    with counted(by_kernels=by_kernels, calls=False):
        optimizer.step()
    with counted(by_kernels=by_kernels) as told:
        optimizer.step()
    return told


def shapes(elements: int) -> Sequence[tuple[int, int]]:
    """Return the shapes of 32 matrices with about this number of elements."""
    row = min(_ROW, max(elements // _TENSORS // 128, 1) * 128)
    return [(max(elements // _TENSORS // row, 1), row)] * _TENSORS


def minimum(elements: int, how: str, weights: Weights, state_dtype: StateDtype) -> float:
    """Return the least bytes an element, with two states.

    torch's own step moves its bytes on FP32 tensors. Before it, each tensor that is not held in FP32 is read as it is
    held and written in FP32, and after it the other way round. A fused kernel reads and writes what is held once, and
    reads the gradient.
    """
    kind, state = 2 + WAYS[weights].bytes_beside, STATE_FORMS[state_dtype].bytes_each
    if how == "hmpx":
        return BF16.itemsize + 2 * kind + 4 * state
    own = step_of(elements, how, None, torch.float32, by_kernels=False).moved / elements
    states = 0 if state_dtype is torch.float32 else 4 * (state + 4)
    return own + (BF16.itemsize + 4) + 2 * (kind + 4) + states
