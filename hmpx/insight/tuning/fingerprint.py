"""What tells two tunings apart: a number for the values of a model and of batches, the same in every process."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from zlib import crc32

import torch
from torch.utils._pytree import tree_leaves

from hmpx.insight.tensors import Tensor
from hmpx.ops.observing import unobserved

_CHUNK = 1 << 20  # elements that are widened to 64 bits at once
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = bool | int | float | complex | str | bytes | torch.dtype | torch.device | None


def fingerprint(values: Iterable[Any]) -> str:
    """Of tensors and plain values in tuples, lists and mappings; of anything else, the type alone."""
    with unobserved(), torch.no_grad():
        found = 0
        for leaf in _leaves(values):
            found = crc32(repr(_of_tensor(leaf) if isinstance(leaf, Tensor) else _of_other(leaf)).encode(), found)
        return f"{found:08x}"


def fingerprint_of(function: Any) -> str:
    """Of what a loss does: the code of a function, with its defaults and the values that it closes over."""
    return fingerprint(_parts(function, []))


def _parts(value: Any, around: list[Any]) -> Iterator[Any]:
    """What a value is made of, down to plain values and tensors. around: what it is found in."""
    inside: tuple[Any, ...] = ()
    if any(value is each for each in around):  # a function that closes over itself
        return
    if isinstance(value, functools.partial):
        inside = value.func, *value.args, *value.keywords.items()
    elif isinstance(value, types.MethodType):
        inside = value.__func__, value.__self__
    elif isinstance(value, types.FunctionType):
        closed = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        inside = value.__code__, value.__defaults__, value.__kwdefaults__, *closed
    elif isinstance(value, types.CodeType):
        yield value.co_code, value.co_names
        inside = value.co_consts
    elif isinstance(value, torch.nn.Module):
        yield [*value.parameters()], [*value.buffers()]
        inside = (type(value).forward,)
    elif isinstance(getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004
        yield type(value).__qualname__
        inside = type(value).__call__, vars(value)
    elif isinstance(value, types.BuiltinFunctionType):
        yield value.__qualname__
    else:
        yield value
    for each in inside:
        yield from _parts(each, [*around, value])


def _leaves(values: Any) -> Iterator[Any]:
    for leaf in tree_leaves(values if not isinstance(values, Iterator) else list(values)):
        if isinstance(leaf, Mapping):  # one that torch does not look into, as tokenizers return
            yield from _leaves(dict(leaf))
        else:
            yield leaf


def _of_other(value: Any) -> str:
    return repr(value) if isinstance(value, _PLAIN) else type(value).__name__


def _of_tensor(tensor: Tensor) -> tuple:
    """Its shape and dtype, and the sum of its bits with other weights for each place, in whole numbers of 64 bits."""
    about = tuple(tensor.shape), str(tensor.dtype)
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel() or tensor.is_quantized:
        return about
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().reshape(-1).view(_BITS[plain.element_size()])
    generator = torch.Generator().manual_seed(0)
    size = min(_CHUNK, bits.numel())
    weights = torch.randint(1, 1 << 62, (size,), generator=generator).to(bits.device) * 2 + 1
    sums = [(chunk.long() * weights[: chunk.numel()]).sum() for chunk in bits.split(_CHUNK)]
    return (*about, *torch.stack(sums).tolist())
