"""Saves tensors for the backward of FP32 kernels in BF16 or FP16, as the native op would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hmpx.ops.wrapping.rules import METHODS
from hmpx.ops.wrapping.weight_cache import storage_of

Tensor = torch.Tensor
_to_float = METHODS[torch.float32]


class _Saved:
    """A saved tensor of one op. version: of the caller's tensor, which must not change before the backward."""

    __slots__ = ("held", "low", "version")

    def __init__(self, held: Tensor) -> None:
        self.held: Any = held  # or what another hook made of it
        self.low = False
        self.version: int | None = None


class Keeper:
    """The saved tensors of one op; FP32 ones are held in BF16 or FP16.

    Hooks that somebody else has set (of checkpointing, of offloading) are given what a native op would keep.
    """

    def __init__(self) -> None:
        self._saved: list[_Saved] = []
        self._pack: Callable[[Tensor], Any] | None
        self._unpack: Callable[[Any], Tensor] | None
        self._pack, self._unpack = torch._C._autograd._top_saved_tensors_default_hooks(True) or (None, None)

    def pack(self, tensor: Tensor) -> _Saved:
        kept = _Saved(tensor)
        self._saved.append(kept)
        return kept

    def narrow(self, low: torch.dtype, pairs: list[tuple[Tensor, Tensor]], round_all: bool) -> None:
        """Replace the FP32 tensors once the op has returned.

        pairs: each FP32 tensor that the op was given or returned, with its low counterpart, which is kept in its place.
        round_all: what else the op keeps is rounded; else only where that changes nothing.
        """
        kept_here, self._saved = self._saved, []  # the graph holds this object
        counterparts = {storage_of(wide).data_ptr(): (wide, own) for wide, own in pairs if wide.numel()}
        for kept in kept_here:
            tensor = kept.held
            if tensor.dtype is torch.float32:
                pointer = storage_of(tensor).data_ptr()
                own = _same_view(tensor, *counterparts.get(pointer, (None, None)))
                if own is not None:
                    kept.held, kept.low, kept.version = own, True, own._version
                else:
                    narrow = METHODS[low](tensor)
                    if round_all or torch.equal(_to_float(narrow), tensor):
                        kept.held, kept.low = narrow, True
                        counterparts.setdefault(pointer, (tensor, narrow))  # it may be kept twice
            if self._pack:
                kept.held, kept.version = self._pack(kept.held), None

    def unpack(self, kept: _Saved) -> Tensor:
        tensor = self._unpack(kept.held) if self._unpack else kept.held
        if kept.version is not None and tensor._version != kept.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                f"expected version {kept.version} instead"
            )
        return _to_float(tensor) if kept.low else tensor


def _same_view(tensor: Tensor, wide: Tensor | None, own: Tensor | None) -> Tensor | None:
    """The view of `own` that corresponds to the view `tensor` of `wide`; None if their layouts differ."""
    if own is None or wide is None:
        return None
    own, offset = own.detach(), tensor.storage_offset() - wide.storage_offset()
    if wide.stride() == own.stride():
        return own.as_strided(tensor.size(), tensor.stride(), own.storage_offset() + offset)
    steps = dict(zip(wide.stride(), own.stride(), strict=True))
    whole = offset == 0 and len(steps) == wide.dim()
    if whole and sorted(zip(tensor.size(), tensor.stride(), strict=True)) == sorted(
        zip(wide.size(), wide.stride(), strict=True)
    ):
        return own.as_strided(tensor.size(), [steps[step] for step in tensor.stride()], own.storage_offset())
    return None
