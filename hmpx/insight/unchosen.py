"""Finds FP32 results that nobody asked for: a low-precision stream met a small FP32 tensor."""

from __future__ import annotations

from types import FrameType

import torch

from hmpx.insight.module_names import ModuleNames
from hmpx.insight.tensors import LOW, Tensor, name

MIXING = frozenset("add sub mul div where addcmul addcdiv lerp maximum minimum".split())  # ops that take both


def unchosen(names: ModuleNames, frame: FrameType, given: list[Tensor], result: list[Tensor]) -> str:
    """Say which FP32 tensor made FP32 of a low-precision stream although no list asks for it; "" if none did.

    It is a parameter, a buffer, or a tensor smaller than the stream. Two streams of one size make no finding: a sum in
    FP32 of an FP32 residual and a BF16 branch is as mixed precision should be.
    """
    wide = [tensor for tensor in given if tensor.dtype is torch.float32 and tensor.dim()]
    low = [tensor for tensor in given if tensor.dtype in LOW]
    if not wide or not low or not result or result[0].dtype is not torch.float32:
        return ""
    most = max([tensor.numel() for tensor in low])
    named = [names.of_tensor(tensor, frame) for tensor in wide]
    if any(not each and tensor.numel() >= most for each, tensor in zip(named, wide, strict=True)):
        return ""
    shapes = ["x".join(map(str, tensor.shape)) for tensor in wide]
    said = [each or f"a tensor of {shape}" for each, shape in zip(named, shapes, strict=True)]
    return f"float32 comes out, as {' and '.join(said)} in float32 met {name(low[0].dtype)}"
