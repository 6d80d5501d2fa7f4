"""Runs one op in low precision or in FP32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hmpx import region_state
from hmpx.insight.comparing.calls import Asked, Call
from hmpx.insight.reasons import in_a_line
from hmpx.insight.tensors import LOW, Tensor, floating
from hmpx.ops.wrapping.overriding import call
from hmpx.ops.wrapping.rules import METHODS


def in_fp32(asked: Asked) -> Any:
    """The op in FP32: its inputs widened, but for one that it writes to. A cast by hand to less is left out."""
    point = asked.point
    if point.in_place:
        return call(point.original, (*asked.args[:1], *widened(asked.args[1:])), widened(asked.kwargs))
    args, kwargs = widened(asked.args), widened(asked.kwargs)
    result = call(point.original, args, kwargs)
    if point.op == "to" and isinstance(result, Tensor) and result.dtype in LOW:
        return args[0].to(result.device)
    return result


def as_listed(asked: Asked, kept: Call) -> Any:
    """The op on inputs of the dtypes that it had under the lists; None if they cannot be told."""
    if len(floating((asked.args, asked.kwargs))) != len(kept.dtypes):
        asked.site.not_compared = "another number of inputs in FP32"
        return None
    args, kwargs = _in_dtypes(asked, kept.dtypes)
    if asked.point.in_place:
        args = (args[0].clone(), *args[1:])
    try:
        with region_state.region(True) if kept.casting else contextlib.nullcontext():
            return asked.run(*args, **kwargs).result
    except Exception as error:  # of a constant that FP32 holds and the low dtype does not, say
        asked.site.not_compared = f"from what FP32 hands it, it raises {in_a_line(error)}"
        return None


def of_rounded_inputs(asked: Asked, kept: Call) -> Any:
    """The op in FP32 on inputs that are rounded as they came under the lists."""
    args, kwargs = _in_dtypes(asked, kept.given)
    if asked.point.in_place:
        args = (widened(args[0]).clone(), *args[1:])
    return in_fp32(asked.with_arguments(args, kwargs))


def _in_dtypes(asked: Asked, dtypes: tuple[torch.dtype, ...]) -> tuple[tuple, dict]:
    rest = iter(dtypes)
    return _cast(asked.args, rest), _cast(asked.kwargs, rest)


def _cast(value: Any, dtypes: Iterator[torch.dtype]) -> Any:
    """`value` with its floating tensors in these dtypes, one after another, in lists, tuples and dicts too."""
    if isinstance(value, Tensor):
        if not value.dtype.is_floating_point:
            return value
        dtype = next(dtypes, value.dtype)
        return value if dtype is value.dtype else METHODS[dtype](value) if dtype in METHODS else value.to(dtype)
    if isinstance(value, list | tuple):
        items = [_cast(item, dtypes) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _cast(item, dtypes) for key, item in value.items()}
    return value


def widened(value: Any) -> Any:
    """`value` with its tensors of low precision in FP32."""
    if isinstance(value, Tensor):
        return METHODS[torch.float32](value) if value.dtype in LOW else value
    if isinstance(value, list | tuple):
        items = [widened(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: widened(item) for key, item in value.items()}
    return value
