"""Break an operation at each of its steps, and see that everything is as it was.

A step is a function of hmpx that the operation calls: each of them raises once, at its first call. What is undone is
not broken a second time: an error inside of `Changes.close` is another matter, and has tests of its own.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import hmpx

PACKAGE = os.path.dirname(hmpx.__file__)
UNDOING = {"close", "take_back", "__exit__", "restore", "detach"}
LAST = {"enter", "_enter_region"}  # of a region: they only note that it is open, and cannot fail


class Broken(BaseException):
    """As an interrupt of the keyboard: nobody catches it to go on."""


def steps(operation: Callable[[], object]) -> list[types.CodeType]:
    """The functions of hmpx that the operation calls, in the order of their first calls."""
    found: dict[types.CodeType, None] = {}

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and not _undoes(frame):
            found.setdefault(frame.f_code)

    _watched(operation, look)
    return [code for code in found if code.co_name != "<module>"]


def broken_at(code: types.CodeType, operation: Callable[[], object]) -> bool:
    """Run the operation, with an error at the first call of a function; whether the operation has raised it."""
    met = []

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code and not met and not _undoes(frame):
            met.append(code)
            raise Broken(code.co_name)

    try:
        _watched(operation, look)
    except Broken:
        return True
    return False


def _watched(operation: Callable[[], object], look: Callable) -> None:
    before = sys.gettrace()
    sys.settrace(look)  # which is told of calls, and of no lines as it returns nothing
    try:
        operation()
    finally:
        sys.settrace(before)


def _undoes(frame: types.FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in UNDOING | LAST and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


class Trained:
    """A model and its optimizer, every part of which can be told from what it was."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.named_parameters(), lr=1e-2)
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 6, dtype=dtype)).float().square().sum().backward()
            self.optimizer.step()

    def picture(self) -> dict[str, Any]:
        """Values, identities and hooks, by what a message calls them."""
        return dict(self._parts())

    def _parts(self) -> Iterator[tuple[str, Any]]:
        for name, p in [*self.model.named_parameters(), *self.model.named_buffers()]:
            yield f"{name}: object, storage, version", (id(p), p.data_ptr())
            yield f"{name}: bits", _bits(p)
            yield f"{name}: gradient", p.grad is None or _bits(p.grad)
            hooks = (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None))
            yield f"{name}: settings and hooks", (p.requires_grad, [len(each or ()) for each in hooks])
            yield f"{name}: dtype of gradients", p.is_leaf and getattr(p, "grad_dtype", None)
            state = self.optimizer.state.get(p, {})
            yield f"{name}: state", {key: _bits(v) if isinstance(v, torch.Tensor) else v for key, v in state.items()}
        for name, module in self.model.named_modules():
            kept = {
                key: value for key, value in vars(module).items() if not key.startswith(("_param", "_buff", "_mod"))
            }
            yield f"module {name!r}", {key: len(v) if key.endswith("hooks") else id(v) for key, v in kept.items()}
        groups = self.optimizer.param_groups
        yield "groups", [{k: [*map(id, v)] if k == "params" else v for k, v in group.items()} for group in groups]
        own = vars(self.optimizer)
        yield "the optimizer", {key: len(v) if key.endswith("hooks") else id(v) for key, v in own.items()}


def _bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())
