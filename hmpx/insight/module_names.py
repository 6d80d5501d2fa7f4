"""Names of modules and of their tensors, found from the frames in which they run; and FP32 results nobody asked for."""

from __future__ import annotations

import re
import types
import weakref

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.base.torch_private import base_of
from hmpx.insight.tensors import LOW, Tensor
from hmpx.ops.wrapping.callers import modules

_INDEX = re.compile(r"(?<![^. ])\d+(?=\.|\Z| )")  # of a layer, in the name of a module
MIXING = frozenset("add sub mul div where addcmul addcdiv lerp maximum minimum".split())  # ops that take two dtypes
_WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put in front


def numberless(text: str) -> str:
    """Return the name of a module with a star for each number, so that equal blocks have one name."""
    return _INDEX.sub("*", text)


class ModuleNames:
    """The name of each module within the outermost module that was running when it was first seen."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, str]] = {}

    def of_module(self, module: torch.nn.Module | None, frame: types.FrameType) -> str:
        """Return the dotted name of a module that runs in `frame`; the name of its class where it is the outermost."""
        if module is None:
            return ""
        known = self._known.get(id(module))
        if known is None or known[0]() is not module:
            *_, root = modules(frame)  # the outermost
            self.add(root)
            known = self._known.get(id(module))
        return known[1] if known else type(module).__name__

    def add(self, root: torch.nn.Module) -> None:
        """Name the modules of a model by their names in it."""
        for name, each in root.named_modules():
            for wrapper in _WRAPPERS:
                name = f"{name}.".replace(wrapper, "", 1).rstrip(".") if name else name
            self._known[id(each)] = weakref.ref(each), name or type(each).__name__

    def of_tensor(self, tensor: torch.Tensor, frame: types.FrameType) -> str:
        """Return the name of a parameter or buffer; "" for any other tensor."""
        seen: set[int] = set()
        for owner in modules(frame):
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for kind, owned in (("parameter", owner.named_parameters()), ("buffer", owner.named_buffers())):
                for name, each in owned:
                    if each is tensor or each is base_of(tensor):
                        prefix = self.of_module(owner, frame)
                        whole = prefix == type(owner).__name__
                        return f"{kind} {name if whole else f'{prefix}.{name}'}"
        return ""


def unchosen(names: ModuleNames, frame: types.FrameType, given: list[Tensor], result: list[Tensor]) -> str:
    """Say which small FP32 tensor made FP32 of a low-precision stream although no list asks for it; "" if none did.

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
    return f"float32 comes out, as {' and '.join(said)} in float32 met {dtype_name(low[0].dtype)}"
