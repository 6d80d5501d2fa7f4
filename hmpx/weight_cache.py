"""Casts of weights that outlive a call: what `cached_weights()` keeps, and what makes it forget.

A weight is written to in many ways, and not all of them leave a trace. What guards a kept cast:

- in-place ops and `load_state_dict` raise the weight's `_version`; another place in memory shows in `data_ptr()`;
- `.data`, whose writes raise nothing, is watched while a cache is open: reading or setting it drops the cast;
- optimizer steps, of which fused ones raise nothing, drop the casts of their parameters;
- a weight whose storage something else holds too (a flat buffer of a sharded model, a `.data` taken earlier, a NumPy
  array) is not kept at all, nor one that needs a gradient, whose cast would be part of a graph.

Writes through `untyped_storage()`, DLPack or kernels of other libraries, made after the cast was kept, are not seen.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn import Parameter

from hmpx.kernels.lazy import is_lazy

logger = logging.getLogger("hmpx")

Tensor = torch.Tensor
open_caches: dict[int, WeightCache] = {}  # by thread; empty while nobody caches
_lock = threading.Lock()
_data = torch._C.TensorBase.__dict__["data"]


class _Kept(NamedTuple):
    weight: Parameter  # no weak reference: torch.utils.swap_tensors refuses tensors that have one
    version: int
    pointer: int
    stream: object
    cast: Tensor


class WeightCache:
    """The casts of one thread's outermost `cached_weights()`.

    refused: how many casts were made anew, by the reason for not keeping them.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.depth = 0
        self._kept: dict[tuple, _Kept] = {}

    def get(self, weight: Parameter, dtype: torch.dtype, cast: Callable[[Tensor], Tensor]) -> Tensor:
        """`cast(weight)`, or the one that was kept."""
        if weight.requires_grad and torch.is_grad_enabled():
            return self._refuse("it requires a gradient; put torch.no_grad() around", weight, cast)
        if is_lazy(weight):
            return self._refuse("its device computes later, in one graph", weight, cast)
        if torch._C._len_torch_dispatch_stack() or not (weight.is_cpu or _runs_now(weight)):
            return cast(weight)
        kept = self._kept.get((id(weight), dtype))
        if kept is not None:
            held, version, pointer, stream, made = kept
            unwritten = held is weight and version == weight._version and pointer == weight.data_ptr()
            # An op may have returned a view of the cast, and somebody written to that.
            if unwritten and made._version == 0 and (stream is None or stream == _stream(weight)):
                return made
        return self._make(weight, dtype, cast)

    def _make(self, weight: Parameter, dtype: torch.dtype, cast: Callable[[Tensor], Tensor]) -> Tensor:
        self._kept.pop((id(weight), dtype), None)
        if weight.is_inference():
            return self._refuse("it was made in inference mode, where writes leave no trace", weight, cast)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return cast(weight)
        if _is_shared(weight):
            return self._refuse("something else holds its storage", weight, cast)
        version, pointer = weight._version, weight.data_ptr()
        # The cast is an ordinary tensor also in inference mode, so that it may be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            made = cast(weight)
        self._kept[id(weight), dtype] = _Kept(weight, version, pointer, _stream(weight), made)
        return made

    def clear(self) -> None:
        """Forget every cast."""
        self._kept.clear()

    def forget(self, identities: set[int]) -> None:
        """Forget the casts of the weights with these `id`s."""
        for key in [key for key in list(self._kept) if key[0] in identities]:
            self._kept.pop(key, None)

    def forget_storage(self, tensor: Tensor) -> None:
        """Forget what lies in the storage of `tensor`."""
        pointer = tensor.untyped_storage().data_ptr()
        for key, kept in list(self._kept.items()):
            if pointer in (kept.pointer, kept.cast.data_ptr()):
                self._kept.pop(key, None)

    @property
    def casts(self) -> tuple[Tensor, ...]:
        """What is kept now."""
        return tuple(kept.cast for kept in self._kept.values())

    def _refuse(self, reason: str, weight: Parameter, cast: Callable[[Tensor], Tensor]) -> Tensor:
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            logger.warning("hmpx: cached_weights() casts a %s weight anew: %s", tuple(weight.shape), reason)
        return cast(weight)


def cast_weight(weight: Parameter, dtype: torch.dtype, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """`cast(weight)`, kept where this thread has a cache open. In compiled code, the compiler fuses the cast."""
    if torch.compiler.is_dynamo_compiling():
        return cast(weight)
    cache = current()
    return cast(weight) if cache is None else cache.get(weight, dtype, cast)


def forget(params: Iterable[Tensor]) -> None:
    """Forget the casts of parameters that an optimizer has stepped."""
    identities = {id(p) for p in params}
    for cache in list(open_caches.values()):
        cache.forget(identities)


def current() -> WeightCache | None:
    """This thread's cache, where one is open."""
    return open_caches.get(threading.get_ident())


def open_cache() -> WeightCache:
    """This thread's cache. Calls nest."""
    with _lock:
        if not open_caches:
            Tensor.data = property(_read_data, _write_data, doc=_data.__doc__)
        cache = open_caches.setdefault(threading.get_ident(), WeightCache())
        cache.depth += 1
    return cache


def close_cache() -> None:
    """Take back one `open_cache`; the last one gives the memory back."""
    with _lock:
        cache = open_caches[threading.get_ident()]
        cache.depth -= 1
        if cache.depth == 0:
            del open_caches[threading.get_ident()]
            cache.clear()
        if not open_caches:
            del Tensor.data


def _read_data(tensor: Tensor) -> Tensor:
    _forget_written(tensor)
    return _data.__get__(tensor)


def _write_data(tensor: Tensor, value: Tensor) -> None:
    _forget_written(tensor)
    _data.__set__(tensor, value)


def _forget_written(tensor: Tensor) -> None:
    for cache in list(open_caches.values()):
        cache.forget({id(tensor)})
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors without storage
            cache.forget_storage(tensor)


def _is_shared(weight: Parameter) -> bool:
    """Whether anything but the weight, and the storage object asked for here, holds its memory."""
    storage = weight.untyped_storage()
    return weight.storage_offset() != 0 or torch._C._storage_Use_Count(storage._cdata) > 2


def _runs_now(weight: Parameter) -> bool:
    """Whether ops on the weight's device run, as opposed to being recorded into a CUDA graph."""
    capturing = getattr(torch.get_device_module(weight.device), "is_current_stream_capturing", None)
    return capturing is None or not capturing()


def _stream(weight: Parameter) -> object:
    """What tells streams apart: work on another one does not wait for the cast. None where there are none."""
    if weight.is_cpu:
        return None
    current = getattr(torch.get_device_module(weight.device), "current_stream", None)
    return None if current is None else current(weight.device)
