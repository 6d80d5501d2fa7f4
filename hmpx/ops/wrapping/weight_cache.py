"""The cache of weight casts that `cached_weights()` opens, and when it drops a cast.

A weight is written to in many ways, and not all of them leave a trace. These guard a kept cast:

- in-place ops and `load_state_dict` raise the weight's `_version`; another place in memory shows in `data_ptr()`;
- `.data` and the ways to the memory itself (`numpy()`, `untyped_storage()`, `data_ptr()`, `__dlpack__()`) do not raise
  `_version` when they are written through, so they are watched while a cache is open: taking one of them, of the weight
  or of a view of it, drops the cast, and none is kept while the taken object is alive;
- optimizer steps, of which fused ones do not raise `_version`, drop the casts of their parameters;
- so do collectives of `torch.distributed`, which do not raise it either; until the work is done, none is kept;
- a weight whose storage something else holds too (a flat buffer of a sharded model, a `.data` taken earlier, a NumPy
  array), or another process (shared or mapped memory), is not kept at all, nor one that needs a gradient, whose cast
  would be part of a graph.

Writes are not seen through an address, a storage or a NumPy array that the weight was made of before its cast was kept;
nor those of another process that was given memory of a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

from hmpx.base.changes import Attribute
from hmpx.base.process_state import new_lock, open_caches, watching_writes
from hmpx.base.tensors import is_lazy, tensors_in
from hmpx.base.torch_private import KEPT_CASTS, FakeTensor, dispatch_modes, in_torch_func, private, version_of

logger = logging.getLogger("hmpx")

Tensor = torch.Tensor
_lock = new_lock()
storage_of, _pointer, _to_float = Tensor.untyped_storage, Tensor.data_ptr, Tensor.float  # as torch made them


class _CachedCast:
    """One weight's cast, with the versions of both when it was made. wide: the cast in FP32, if a kernel needs it."""

    __slots__ = ("cast", "pointer", "stream", "version", "weight", "wide")

    def __init__(self, weight: Parameter, version: int, pointer: int, cast: Tensor) -> None:
        self.weight = weight  # no weak reference: torch.utils.swap_tensors refuses tensors that have one
        self.version, self.pointer, self.stream = version, pointer, _stream(weight)
        self.cast = cast
        self.wide: Tensor | None = None


class WeightCache:
    """The casts of one thread's outermost `cached_weights()`.

    refused: how many casts were made anew, by the reason for not keeping them.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self.depth = 0
        self.pending: list[tuple[Any, int]] = []  # works of collectives, and the storages that they write to
        self._kept: dict[tuple[int, Any], _CachedCast] = {}
        self._of_cast: dict[int, _CachedCast] = {}  # the same, by identity of the cast

    def weight_of(self, value: Tensor) -> Parameter | None:
        """Return the weight that a tensor is, or is a kept cast of; None if there is none."""
        kept = self._of_cast.get(id(value))
        return kept.weight if kept is not None else value if type(value) is Parameter else None

    def get(self, weight: Parameter, dtype: Any, cast: Callable[[Tensor], Tensor], views: int = 0) -> Tensor:
        """Return the cached cast, or a new `cast(weight)`.

        dtype: of the cast, or another key of it. views: how many views of the weight the caller holds.
        """
        kept = self._kept.get((id(weight), dtype))
        if kept is not None and not dispatch_modes():
            made, stream = kept.cast, kept.stream
            now = version_of(weight), _pointer(weight)
            unwritten = kept.weight is weight and (kept.version, kept.pointer) == now
            ready = stream is None or (stream == _stream(weight) and _runs_now(weight))
            # An op may have returned a view of the cast, and somebody written to that.
            if unwritten and ready and version_of(made) == 0 and not (weight.requires_grad and is_grad_enabled()):
                return made
        return self._make(weight, dtype, cast, views)

    def _make(self, weight: Parameter, dtype: Any, cast: Callable[[Tensor], Tensor], views: int) -> Tensor:
        if weight.requires_grad and is_grad_enabled():
            return self._refuse("it requires a gradient; put torch.no_grad() around", weight, cast)
        if is_lazy(weight):
            return self._refuse("its device computes later, in one graph", weight, cast)
        if dispatch_modes() or not (weight.is_cpu or _runs_now(weight)):
            return cast(weight)
        key = id(weight), dtype
        self._drop(key)
        if in_torch_func() is not None or KEPT_CASTS.missing:
            return cast(weight)
        if reason := self._unnoticed(weight, views):
            return self._refuse(reason, weight, cast)
        version, pointer = version_of(weight), _pointer(weight)
        # The cast is an ordinary tensor also in inference mode, so that it may be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            made = cast(weight)
        self._kept[key] = self._of_cast[id(made)] = _CachedCast(weight, version, pointer, made)
        return made

    def _unnoticed(self, weight: Parameter, views: int) -> str:
        """Return why a write to the weight could not be noticed; empty if it could.

        Nothing but the weight, these views, and the storage object asked for here, may hold its memory.
        """
        if weight.is_inference():
            return "it was made in inference mode, where writes leave no trace"
        self.pending = [each for each in self.pending if each[0] is None or not each[0].is_completed()]
        storage = storage_of(weight)
        if weight.storage_offset() != 0 or _use_count(storage._cdata) > 2 + views:
            return "something else holds its storage"
        # `is_shared` is said of all memory of a GPU; what came from another process cannot be resized there.
        if storage.is_shared() if weight.is_cpu else not storage.resizable():
            return "another process may write to its memory"
        writes = any(storage.data_ptr() == written for _, written in self.pending)
        return "a collective writes to it" if writes else ""

    def _refuse(self, reason: str, weight: Parameter, cast: Callable[[Tensor], Tensor]) -> Tensor:
        self.refused[reason] += 1
        if self.refused[reason] == 1:
            logger.warning("hmpx: cached_weights() casts a %s weight anew: %s", tuple(weight.shape), reason)
        return cast(weight)

    def widen(self, value: Tensor) -> Tensor:
        """Return `value` in FP32 for a kernel; cached for a weight or a cached cast."""
        kept = self._of_cast.get(id(value))
        if kept is None or version_of(value):
            return self.get(value, torch.float32, _to_float) if type(value) is Parameter else _to_float(value)
        wide = kept.wide
        if wide is None or version_of(wide):
            with torch.inference_mode(False), torch.no_grad():
                kept.wide = wide = _to_float(value)
                if value.dtype is torch.bfloat16 and value.dim() and wide.is_contiguous():
                    upper = wide.view(value.dtype)[..., 1::2]  # a BF16 cast takes no memory of its own then
                    if torch.equal(upper, value):
                        del self._of_cast[id(value)]
                        kept.cast = upper
                        self._of_cast[id(upper)] = kept
        return wide

    def _drop(self, key: tuple[int, Any]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._of_cast.pop(id(kept.cast), None)

    def clear(self) -> None:
        """Forget every cast."""
        self._kept.clear()
        self._of_cast.clear()

    def forget(self, identities: set[int]) -> None:
        """Drop the casts of the weights with these `id`s."""
        for key in [key for key in list(self._kept) if key[0] in identities]:
            self._drop(key)

    def forget_storage(self, tensor: Tensor) -> None:
        """Drop the casts of weights in the storage of `tensor`."""
        pointer = storage_of(tensor).data_ptr()
        for key, kept in list(self._kept.items()):
            if pointer in (kept.pointer, storage_of(kept.cast).data_ptr()):
                self._drop(key)

    @property
    def casts(self) -> tuple[Tensor, ...]:
        """The cached casts."""
        return tuple(kept.cast for kept in self._kept.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the cached casts, FP32 copies included."""
        held = [t for kept in self._kept.values() for t in (kept.cast, kept.wide) if t is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in map(storage_of, held)}.values())


def cast_weight(weight: Parameter, dtype: torch.dtype, cast: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `cast(weight)`, cached if this thread has a cache open. In compiled code the compiler fuses it instead."""
    if is_dynamo_compiling():
        return cast(weight)
    cache = open_caches.get(get_ident())
    return cast(weight) if cache is None else cache.get(weight, dtype, cast)


def current() -> WeightCache | None:
    """Return this thread's cache; None if none is open."""
    return open_caches.get(get_ident())


def open_cache() -> None:
    """Open this thread's cache. Calls nest."""
    KEPT_CASTS.is_on()
    with _lock:
        cache = open_caches.get(get_ident()) or WeightCache()
        if not open_caches:
            try:
                for place, watched in _watched.items():
                    watching_writes.put(place, watched)
            except BaseException:
                watching_writes.close()
                raise
        open_caches[get_ident()] = cache
        cache.depth += 1


def close_cache() -> None:
    """Undo one `open_cache`; the last one gives the memory back."""
    with _lock:
        cache = open_caches[get_ident()]
        cache.depth -= 1
        if cache.depth == 0:
            del open_caches[get_ident()]
            cache.clear()
        if not open_caches:
            watching_writes.close()


def _runs_now(weight: Parameter) -> bool:
    """Return whether ops on the weight's device run, as opposed to being recorded into a CUDA graph."""
    capturing = getattr(_device_module(weight.device), "is_current_stream_capturing", None)
    return capturing is None or not capturing()


def _device_module(device: torch.device) -> ModuleType:
    try:
        return torch.get_device_module(device)
    except RuntimeError:  # the meta device has none
        return torch.cpu


def _stream(weight: Parameter) -> object:
    """Return the current stream, since work on another one does not wait for the cast. None without streams."""
    if weight.is_cpu:
        return None
    current = getattr(_device_module(weight.device), "current_stream", None)
    return None if current is None else current(weight.device)


# Writes that do not raise a tensor's `_version`

_data: Any = inspect.getattr_static(Tensor, "data")
_use_count = private("torch._C._storage_Use_Count")
_Group: Any = getattr(torch.distributed, "ProcessGroup", None)


def _watch(owner: Any, name: str) -> tuple[Attribute, Callable]:
    function = getattr(owner, name)

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        for tensor in tensors_in((*args, *kwargs.values())):
            _forget_written(tensor)
        return function(*args, **kwargs)

    return Attribute(owner, name, f"{owner.__name__}.{name}"), watched


def _watch_collective(name: str) -> tuple[Attribute, Callable]:
    function = getattr(_Group, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        for tensor in tensors_in((*args, *kwargs.values())):
            _forget_written(tensor)
            for cache in list(open_caches.values()):
                cache.pending.append((work, storage_of(tensor).data_ptr()))
        return work

    return Attribute(_Group, name, f"ProcessGroup.{name}"), watched


def _read_data(tensor: Tensor) -> Tensor:
    _forget_written(tensor)
    return _data.__get__(tensor)


def _write_data(tensor: Tensor, value: Tensor) -> None:
    _forget_written(tensor)
    _data.__set__(tensor, value)


_watched: dict[Attribute, Any] = dict(
    (
        (Attribute(Tensor, "data", "Tensor.data"), property(_read_data, _write_data, doc=_data.__doc__)),
        *(_watch(Tensor, name) for name in ("numpy", "untyped_storage", "data_ptr", "__dlpack__")),
        *(_watch(owner, "to_dlpack") for owner in (torch, torch.utils.dlpack)),
        # The methods that are handed tensors, as pybind says in their first line.
        *(
            _watch_collective(name)
            for name, each in vars(_Group or object).items()
            if "torch.Tensor" in str(each.__doc__)
        ),
    )
)


def _forget_written(tensor: Tensor) -> None:
    if isinstance(tensor, FakeTensor):  # a compiler's, which has no memory
        return
    for cache in list(open_caches.values()):
        cache.forget({id(tensor)})
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors without storage
            cache.forget_storage(tensor)
