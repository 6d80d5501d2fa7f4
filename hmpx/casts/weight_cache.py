"""Casts of weights that outlive a call: what `cached_weights()` keeps, and what makes it forget.

A weight is written to in many ways, and not all of them leave a trace. What guards a kept cast:

- in-place ops and `load_state_dict` raise the weight's `_version`; another place in memory shows in `data_ptr()`;
- `.data` and the ways to the memory itself (`numpy()`, `untyped_storage()`, `data_ptr()`, `__dlpack__()`) do not raise
  `_version` when they are written through, so they are watched while a cache is open: taking one of them, of the weight
  or of a view of it, drops the cast, and none is kept while what was taken is alive;
- optimizer steps, of which fused ones do not raise `_version`, drop the casts of their parameters;
- a weight whose storage something else holds too (a flat buffer of a sharded model, a `.data` taken earlier, a NumPy
  array) is not kept at all, nor one that needs a gradient, whose cast would be part of a graph.

One kind of write is not seen: through an address, or a storage, that was taken before the cast was kept.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.nn import Parameter

from hmpx.casts.watched_writes import watch_writes
from hmpx.process_state import open_caches, watching_writes
from hmpx.rounding.xla import is_lazy

logger = logging.getLogger("hmpx")

Tensor = torch.Tensor
_lock = threading.Lock()
storage_of, _pointer = Tensor.untyped_storage, Tensor.data_ptr  # as torch made them


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
        self._wide: dict[int, tuple[Tensor, Tensor]] = {}  # by identity of a kept cast: that, and the same in FP32

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
            unwritten = held is weight and version == weight._version and pointer == _pointer(weight)
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
        version, pointer = weight._version, _pointer(weight)
        # The cast is an ordinary tensor also in inference mode, so that it may be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            made = cast(weight)
        self._kept[id(weight), dtype] = _Kept(weight, version, pointer, _stream(weight), made)
        return made

    def widen(self, value: Tensor, widen: Callable[[Tensor], Tensor]) -> Tensor:
        """`widen(value)`, FP32 for a kernel that wants it so; of a cast that is kept, it is kept too."""
        known = self._wide.get(id(value))
        if known is not None and known[0] is value:
            low, wide = known
            if low._version == 0 and wide._version == 0:
                return wide
        key = next((key for key, kept in self._kept.items() if kept.cast is value), None)
        if key is None or value._version:
            return widen(value)
        with torch.inference_mode(False), torch.no_grad():
            wide = widen(value)
            low = _upper_halves(wide, value)
        self._kept[key] = self._kept[key]._replace(cast=low)
        self._wide[id(low)] = low, wide
        self._prune()
        return wide

    def _prune(self) -> None:
        """Forget FP32 copies of casts that are not kept any more."""
        if self._wide:
            alive = {id(kept.cast) for kept in self._kept.values()}
            self._wide = {key: pair for key, pair in self._wide.items() if key in alive}

    def clear(self) -> None:
        """Forget every cast."""
        self._kept.clear()
        self._prune()

    def forget(self, identities: set[int]) -> None:
        """Forget the casts of the weights with these `id`s."""
        for key in [key for key in list(self._kept) if key[0] in identities]:
            self._kept.pop(key, None)
        self._prune()

    def forget_storage(self, tensor: Tensor) -> None:
        """Forget what lies in the storage of `tensor`."""
        pointer = storage_of(tensor).data_ptr()
        for key, kept in list(self._kept.items()):
            if pointer in (kept.pointer, storage_of(kept.cast).data_ptr()):
                self._kept.pop(key, None)
        self._prune()

    @property
    def casts(self) -> tuple[Tensor, ...]:
        """What is kept now."""
        return tuple(kept.cast for kept in self._kept.values())

    @property
    def nbytes(self) -> int:
        """What is kept now takes so many bytes, copies in FP32 included."""
        held = map(storage_of, (*self.casts, *(wide for _, wide in self._wide.values())))
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

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


def _upper_halves(wide: Tensor, low: Tensor) -> Tensor:
    """`low`, if it is BF16, as the upper halves of the same numbers in FP32: it takes no memory of its own then."""
    if low.dtype is torch.bfloat16 and low.dim() and wide.is_contiguous():
        upper = wide.view(low.dtype)[..., 1::2]
        if torch.equal(upper, low):
            return upper
    return low


def widen_weight(value: Tensor, widen: Callable[[Tensor], Tensor]) -> Tensor:
    """`widen(value)`, to FP32; of a weight, or of its cast that is kept, it is kept where this thread has a cache."""
    cache = current()
    if cache is None:
        return widen(value)
    return cache.get(value, torch.float32, widen) if type(value) is Parameter else cache.widen(value, widen)


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
        cache = open_caches.get(threading.get_ident())
        if cache is None:
            cache = WeightCache()
        if not open_caches:
            try:
                watch_writes(watching_writes)
            except BaseException:
                watching_writes.close()
                raise
        open_caches[threading.get_ident()] = cache
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
            watching_writes.close()


def _is_shared(weight: Parameter) -> bool:
    """Whether anything but the weight, and the storage object asked for here, holds its memory."""
    storage = storage_of(weight)
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
