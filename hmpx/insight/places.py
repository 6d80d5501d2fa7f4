"""Places of calls, and names of modules and their tensors, found from the frames in which they run."""

from __future__ import annotations

import os
import re
import site
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.base.torch_private import base_of
from hmpx.insight.tensors import LOW, Tensor
from hmpx.ops.wrapping.callers import frames, modules, users_frame

_INDEX = re.compile(r"(?<![^. ])\d+(?=\.|\Z| )")  # of a layer, in the name of a module
MIXING = frozenset("add sub mul div where addcmul addcdiv lerp maximum minimum".split())  # ops that take two dtypes
# The folders of packages: of this interpreter, of its user, and the one that torch is in.
PACKAGES = tuple(
    os.path.join(folder, "")
    for folder in (
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(torch.__file__)),
    )
)
_OWN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")  # hmpx, however it is installed
_LIBRARIES = (*PACKAGES, _OWN, os.path.dirname(os.__file__) + os.sep, "<frozen")
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


class Place(NamedTuple):
    """Where an op was called.

    Attributes:
        where: the line, as file:line. script: the same, or the line of the script that called a library's line.
        module: the name of the module that ran. is_inside: whether that is not the outermost one.
    """

    where: str
    script: str
    module: str
    is_inside: bool

    @property
    def within(self) -> str:
        """The library's line, behind a comma; "" if it is the script's."""
        return "" if self.where == self.script else f", in {short_place(self.where)}"


class CallPlaces:
    """The places of calls; each line of each module is looked up once.

    names: of modules and parameters.
    """

    def __init__(self) -> None:
        self.names = ModuleNames()
        self._known: dict[tuple[int, int, int], tuple[Place, types.CodeType | None, Callable[[], Any]]] = {}

    def of(self, frame: types.FrameType) -> Place:
        """Return the place that runs in a frame."""
        user, module = users_frame(frame), next(modules(frame), None)
        code, line = (user.f_code, user.f_lineno) if user is not None else (None, 0)
        known = self._known.get((id(code), line, id(module)))
        if known is None or known[2]() is not module:  # or another one lies where it was
            script = next((each for each in frames(user) if not _is_of_library(each.f_code.co_filename)), user)
            where, editable = (f"{each.f_code.co_filename}:{each.f_lineno}" if each else "" for each in (user, script))
            name = self.names.of_module(module, frame)
            place = Place(where, editable, name, name not in ("", type(module).__name__))
            known = place, code, weakref.ref(module) if module is not None else _nothing
            self._known[id(code), line, id(module)] = known
        return known[0]


def _nothing() -> None:
    return None


def _is_of_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(f"{os.sep}{each}-packages{os.sep}" in file for each in ("site", "dist"))


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


def at_place(where: str, op: str, module: str) -> str:
    """Return line, op and module of a call as one text."""
    inside = f"{op} in {module}" if module else op
    return f"{where}: {inside}" if where else inside


def short_place(where: str) -> str:
    """Shorten file:line to the path from the folder of the program or of its packages, or else to the file's name."""
    path, _, line = where.rpartition(":")
    inside = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.basename(path)
    inside = next((path.removeprefix(folder) for folder in PACKAGES if path.startswith(folder)), inside)
    return f"{inside}:{line}" if path else where


def short_places(text: str) -> str:
    """Shorten each path in a sentence as `short_place` does."""
    text = text.replace(os.path.join(os.getcwd(), ""), "")  # which may have a space in it
    return re.sub(r"(?<![\w.])/[^\s:]+:\d+", lambda found: short_place(found[0]), text)
