"""The ops of whole iterations, forward, backward and step, seen at torch's dispatcher as `audit` sees them.

There each op has the dtypes that it computes in, after the casts of autocast; a dispatch mode changes no result and
patches nothing. What is looked for in an op stands in `op_checks`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import types as python_types
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from hmpx import process_state, rounding, updates
from hmpx.insight.doctor.casts import CastsByHand, in_autocast
from hmpx.insight.doctor.gradients import Accumulation, Underflow
from hmpx.insight.doctor.lineage import Lineage
from hmpx.insight.doctor.nonfinite import Nonfinite
from hmpx.insight.doctor.op_checks import CHECKS, INTEGERS, PRODUCTS, flops, integers_changed
from hmpx.insight.doctor.spots import Spots
from hmpx.insight.doctor.writes import Writes
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.insight.unchosen import MIXING, unchosen
from hmpx.ops.wrapping.callers import frames, users_frame
from hmpx.ops.wrapping.observing import unobserved

_STEPS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch.optim, updates, rounding))
_BESIDE = (*_STEPS, *(os.path.dirname(str(torch.__file__)) + os.sep + each for each in ("nn/utils/", "amp/")))
_node = torch._C._current_autograd_node


class OpWatch(TorchDispatchMode):
    """Looks at ops while it is open, in the thread that opens it, and keeps what was found by line."""

    supports_higher_order_operators = True  # of torch: let `torch.cond` and its kin pass

    def __init__(self) -> None:
        super().__init__()
        self.spots = Spots()
        self.nonfinite = Nonfinite(self.spots)
        self.casts, self.writes = CastsByHand(self.spots), Writes(self.spots)
        self.lineage, self.accumulation, self.underflow = Lineage(), Accumulation(), Underflow()
        self.stepping = self.is_open = self.setting_up = False
        self.trouble = ""
        self.devices: set[str] = set()
        self.low_products = self.wide_products = 0.0  # FLOPs of the forward pass
        self.precision = ""  # of products in FP32
        self.autocast = False  # whether a product ran in low precision by torch.autocast
        self._names: dict[Any, str] = {}
        self._left: int | None = 0

    def open(self, most: int | None, setting_up: bool = False) -> None:
        """Look at ops from now on; at so many at most. setting_up: those that make the model, as `CastsByHand` does."""
        self._left, self.setting_up = most, setting_up
        if not self.is_open:
            self.is_open = True
            self.__enter__()

    def close(self) -> None:
        """Look at none; where another mode was opened since, this one waits beneath it."""
        self._left, self.setting_up = 0, False
        if self.is_open and _get_current_dispatch_mode() is self:
            self.is_open = False
            self.__exit__(None, None, None)
        for each in (self.lineage.marks, self.casts, self.writes):
            each.forget()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self._left == 0:
            return func(*args, **kwargs)
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(getattr(func, "overloadpacket", func)).partition(".")[2]
        before = None
        if self._left is not None:
            self._left -= 1
        if name in Writes.OPS and not self.setting_up:
            with self._own():
                before = self.writes.before(name, args)
        result = func(*args, **kwargs)
        with self._own():
            self._look(func, name, args, kwargs, result, before, sys._getframe(1))
        return result

    @property
    def wide_share(self) -> float:
        """Of the FLOPs of products, those in FP32."""
        return self.wide_products / ((self.low_products + self.wide_products) or 1.0)

    @contextlib.contextmanager
    def _own(self) -> Any:
        """What is computed in here is the doctor's; what it cannot do does the program no harm."""
        try:
            with (
                torch.no_grad(),
                torch._C._DisableTorchDispatch(),
                unobserved() if process_state.converted else contextlib.nullcontext(),
            ):
                yield
        except Exception as error:  # of a kind of tensor that nobody has thought of
            self.trouble = self.trouble or f"{type(error).__name__}: {error}"

    def _look(
        self, func: Any, name: str, args: tuple, kwargs: dict, result: Any, before: Any, frame: python_types.FrameType
    ) -> None:
        given = floating((*args, *kwargs.values()) if kwargs else args)
        results = floating((result,))
        if self.setting_up:
            self.casts.set_up(name, given, results, frame)
            return
        if not (given or results) or not all(map(_is_plain, (*given, *results))):
            return
        node = _node()
        backward = node is not None
        self.casts.follow(name, given, results, frame, backward or self.stepping)
        self.nonfinite.look(name, args, kwargs, given, results, frame, node, self.stepping)
        if backward:
            self.accumulation.look(name, node, args, given, before)
            self.underflow.look(results)
            return
        if before is not None and not self.stepping and not beside(frame):
            self.writes.after(func, name, args, kwargs, before, frame)
        if self.stepping or not results or before is not None:
            return
        out = results[0]
        if name in PRODUCTS:
            self._count(name, given, out, frame)
        elif name in MIXING and out.dtype is torch.float32 and len(given) > 1:
            said = unchosen(self.spots.module_names, frame, given, results)
            if ("parameter " in said or "buffer " in said) and not beside(frame):
                self.spots.note("dtype", name, frame, said)
        self.lineage.follow(name, args, given, out)
        if not beside(frame):
            self.writes.follow(func, name, args, out, frame)
        if name in INTEGERS:
            changed = integers_changed(func, name, args, kwargs, out)
            if changed is not None and not beside(frame):
                self.spots.note("integers", name, frame, changed)
        if out.dtype in LOW and name in CHECKS:
            kind, said = CHECKS[name](given, out, args)
            if kind and not beside(frame):
                self.spots.note(kind, name, frame, said)
        elif name == "binary_cross_entropy" and self.casts.was_low(given[0]):
            self.spots.note("BCE", name, frame, "of what was cast up to float32 before")
        elif name == "sub" and out.dtype in LOW and self.lineage.is_variance(args):
            self.spots.note("variance by difference", name, frame, "")
        elif name == "ones_like" and not out.dim() and out.dtype in LOW and _is_root(frame):
            self.spots.note("loss", name, frame, "")

    def _count(self, name: str, given: list[Tensor], out: Tensor, frame: python_types.FrameType) -> None:
        number, device = flops(name, given, out), out.device.type
        self.devices.add(device)
        if out.dtype in LOW:
            self.low_products += number
            self.autocast |= in_autocast()
        elif out.dtype is torch.float32:
            self.wide_products += number
            self.precision = self.precision or torch.get_float32_matmul_precision()
            self.spots.note("wide product", name, frame, "", number)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be read: no fake tensor, no part of a bunch, no subclass, nothing that is captured."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def beside(frame: python_types.FrameType | None) -> bool:
    """Whether torch's optimizers, clipping or scaling called an op, which is no part of the model."""
    inside = users_frame(frame)
    while frame is not None and frame is not inside:
        name = frame.f_code.co_filename
        if name.startswith(_BESIDE) and not name.endswith("swa_utils.py"):  # which averages weights
            return True
        frame = frame.f_back
    return False


def _is_root(frame: python_types.FrameType | None) -> bool:
    """Whether `backward()` makes the gradient that it begins with."""
    near = itertools.islice(frames(frame), 4)  # Dynamo, where it was imported, stands around a mode's function
    return any(each.f_code.co_name == "_make_grads" for each in near)
