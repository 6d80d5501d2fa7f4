"""Decides whether a wrapper casts here, now: the regions that are open, and whether the op is a model's.

Under ``where="model"`` an op is a model's where the forward of a module runs in this thread, or where grad mode is on
and one of its tensors requires a gradient. Four more are counted as a model's wherever they stand:

- what the `backward` of a `torch.autograd.Function` calls;
- a loss (an op with a `reduction`), so that a loss under `no_grad` is computed like that of training;
- an op whose tensors differ in dtype where torch would raise, as it raises because of other casts;
- what compiled code calls: Dynamo traces a model.

Everything else (data, timesteps, averages, metrics, hooks of gradients) runs as torch runs it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._C import _current_autograd_node, _current_graph_task_id
from torch.autograd.function import BackwardCFunction
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.signatures import Signature

_NONE: Mapping[str, Any] = types.MappingProxyType({})
_ELIGIBLE = frozenset({torch.float32, torch.bfloat16, torch.float16})


class Switch:
    """Whether the wrappers of one conversion are alive. A wrapper that outlives its conversion is inert.

    everywhere: whether every op is cast, and not the model's alone.
    off: whether the conversion is over, or casts are off in some thread or task.
    retired: whether the conversion is over.
    """

    __slots__ = ("everywhere", "off", "retired")

    def __init__(self, everywhere: bool = True) -> None:
        self.everywhere, self.retired = everywhere, False
        self.off = process_state.off

    def retire(self) -> None:
        self.retired = True
        region_state.retire()

    def casts_off(self, signature: Signature | None = None, args: tuple = (), kwargs: Mapping = _NONE) -> bool:
        """Return whether a call is left as it is. Without a signature the call counts as one of the model."""
        if self.retired:
            return True
        if self.everywhere and not (region_state.traced.inside or self.off.any):
            return False
        acts = region_state.acts()
        if acts is not None or signature is None or is_dynamo_compiling():
            return acts is False
        return not (_always_casts(signature, args, kwargs) or is_models(args, kwargs, sys._getframe(1)))


def is_outside(op: str, args: tuple, kwargs: Mapping[str, Any], frame: types.FrameType) -> bool:
    """Return whether an op that is cast is no model's, and is cast because every op is, and not by a region."""
    if region_state.casting() is not None or region_state.acts() is not True or _is_loss(op):
        return False
    return not is_models(args, kwargs, frame)


@functools.cache
def _is_loss(op: str) -> bool:
    return op in catalog() and any(entry.signature.loss for entry in catalog()[op].entries)


def is_models(args: tuple, kwargs: Mapping[str, Any], frame: types.FrameType) -> bool:
    """Return whether an op with these arguments, called in `frame`, is a model's."""
    if _current_graph_task_id() != -1:  # in a backward pass: forwards that are computed again have opened a region
        return isinstance(_current_autograd_node(), BackwardCFunction)  # not a hook
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors((*args, *kwargs.values()))):
        return True
    return _in_forward(frame)


def _always_casts(signature: Signature, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    if not signature.refuses_mixed:
        return signature.loss
    dtypes = {tensor.dtype for tensor in _tensors((*args, *kwargs.values()))} & _ELIGIBLE
    return signature.loss or len(dtypes) > 1


def _in_forward(frame: types.FrameType | None) -> bool:
    """Return whether a module's `forward` is among the callers: one that was called by hand opens no region."""
    while frame is not None:
        code = frame.f_code
        is_forward = code.co_name == "forward" and code.co_argcount
        if is_forward and isinstance(frame.f_locals.get(code.co_varnames[0]), torch.nn.Module):
            return True
        frame = frame.f_back
    return False


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
