"""Checkpoints as they lie on a disk: names, dtypes and shapes at once, numbers a few rows at a time."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as sharded
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hmpx.errors import HmpxError
from hmpx.updates.stepping.step_count import STEP_KEY

Tensor = torch.Tensor
_INDICES = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_FILES = "*.safetensors", "*.bin", "*.pt", "*.pth"
_STATE = "optimizer.pt", "optimizer.bin"  # beside the weights, in a folder of a trainer
_AROUND = "_orig_mod", "module"  # parts of a name: of `torch.compile`, of DDP
_MOST_FRONTS = 8  # that are tried
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I8": "int8"}


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint. rows: reads the rows from one to another; of a tensor without dimensions, all."""

    dtype: torch.dtype
    shape: torch.Size
    rows: Callable[[int, int], Tensor]


@dataclass
class Checkpoint:
    """What a checkpoint holds: weights and state of an optimizer, by name. of_hmpx: hmpx rounded that state."""

    weights: dict[str, Stored] = field(default_factory=dict)
    state: dict[str, Stored] = field(default_factory=dict)
    of_hmpx: bool = False

    def add(self, name: str, tensor: Stored) -> None:
        """Add a tensor where its name says that it belongs."""
        first = name.partition(".")[0]
        (self.state if first.startswith("optim") else self.weights)[name] = tensor


def opened(path: str) -> Checkpoint:
    """Open a checkpoint: a file of safetensors or of ``torch.save``, an index of several, or a folder.

    A folder holds such files, or is one of ``torch.distributed.checkpoint``.

    Raises:
        HmpxError: there is none, it cannot be read, or its library is not installed.
    """
    found, place = Checkpoint(), Path(path)
    if not place.exists():
        raise HmpxError(f"{path}: there is no such file or folder")
    files = [place]
    if place.is_dir():
        if (place / ".metadata").is_file():
            _add_sharded(found, place)
            return found
        index = next((place / each for each in _INDICES if (place / each).is_file()), None)
        kinds = ([each for each in sorted(place.glob(kind)) if each.name not in _STATE] for kind in _FILES)
        files = [index] if index else next(filter(None, kinds), [])
        if not files:
            raise HmpxError(f"{path}: there are no weights in this folder (legal: {', '.join(_FILES)}, .metadata)")
        files += [place / each for each in _STATE if (place / each).is_file()]
    for file in files:
        _add_file(found, file)
    if not found.weights and not found.state:
        raise HmpxError(f"{path}: there are no tensors in it")
    return found


def matched(before: Iterable[str], after: Iterable[str]) -> dict[str, str]:
    """Return the names that two checkpoints have for one tensor, by that of the second.

    Names are compared without what `torch.compile` and DDP put into them, and without the one or two parts that all
    tensors of a model have in front, as in ``{"model": model.state_dict(), "step": ...}``: those that match most.
    """
    known, asked = _inner(before), _inner(after)
    ways = [
        (_without(known, old), _without(asked, new)) for old, new in itertools.product(_fronts(known), _fronts(asked))
    ]
    found, names = max(ways, key=lambda way: len(way[0].keys() & way[1].keys()))  # of equal ones, the first
    return {name: found[inner] for inner, name in names.items() if inner in found}


def _inner(names: Iterable[str]) -> dict[str, str]:
    """Return names by what is left of them without parts that wrappers have put there."""
    return {".".join(part for part in name.split(".") if part not in _AROUND): name for name in names}


def _fronts(names: Iterable[str]) -> list[str]:
    """Return what may stand in front of the names of a model: nothing, or a part or two that many names begin with."""
    counts: Counter[str] = Counter()
    for name in names:
        first, _, rest = name.partition(".")
        second, _, last = rest.partition(".")
        counts.update([f"{first}."] * bool(rest) + [f"{first}.{second}."] * bool(last))
    return ["", *(front for front, _ in counts.most_common(_MOST_FRONTS))]


def _without(names: Mapping[str, str], front: str) -> dict[str, str]:
    return {inner.removeprefix(front): name for inner, name in names.items() if inner.startswith(front)}


def _add_file(found: Checkpoint, file: Path) -> None:
    if file.suffix == ".json":
        try:
            parts = sorted({*json.loads(file.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise HmpxError(f"{file}: is no index of weights, which has a weight_map: {error}") from error
        for part in parts:
            _add_file(found, file.parent / part)
    elif not file.is_file():
        raise HmpxError(f"{file}: there is no such file, but its index names it")
    elif file.suffix == ".safetensors":
        _add_safetensors(found, file)
    else:
        _add_saved(found, file)


def _add_safetensors(found: Checkpoint, file: Path) -> None:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise HmpxError(f"{file}: to read it, pip install safetensors (or hmpx[files])") from None
    try:
        tensors = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise HmpxError(f"{file}: cannot be read: {error}") from error
    for name in tensors.keys():  # noqa: SIM118  it is no dict
        part = tensors.get_slice(name)
        shape, code = torch.Size(part.get_shape()), part.get_dtype()
        rows = partial(_sliced, part) if shape else partial(_rows, tensors.get_tensor(name))
        found.add(name, Stored(getattr(torch, _DTYPES.get(code, "uint8")), shape, rows))


def _sliced(part: Any, first: int, last: int) -> Tensor:
    return part[first:last]


def _add_saved(found: Checkpoint, file: Path) -> None:
    load = partial(torch.load, file, map_location="cpu", weights_only=True)
    try:
        try:
            saved = load(mmap=True)
        except RuntimeError:  # a file of the old format, or none
            saved = load()
    except pickle.UnpicklingError as error:
        why = "it holds more than tensors, numbers and text; save model.state_dict() alone"
        raise HmpxError(f"{file}: is not read with weights_only: {why}") from error
    except (RuntimeError, OSError, EOFError) as error:
        raise HmpxError(f"{file}: is no file of torch.save: {str(error).splitlines()[0]}") from error
    for name, value in _values(saved, file.stem if file.name in _STATE else ""):
        found.of_hmpx |= _is_of_hmpx(name)
        if isinstance(value, Tensor) and value.layout is torch.strided:
            found.add(name, Stored(value.dtype, value.shape, partial(_rows, value)))


def _is_of_hmpx(name: str) -> bool:
    return name.rpartition(".")[2] == STEP_KEY


def _values(saved: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Return what dicts and lists hold, by their keys; that in an optimizer's dict below "optimizer"."""
    if isinstance(saved, Mapping):
        if saved.keys() >= {"state", "param_groups"}:
            name = "optimizer"
        for key, each in saved.items():
            yield from _values(each, f"{name}.{key}" if name else str(key))
    elif isinstance(saved, list | tuple):
        for i, each in enumerate(saved):
            yield from _values(each, f"{name}.{i}" if name else str(i))
    else:
        yield name, saved


def _rows(tensor: Tensor, first: int, last: int) -> Tensor:
    return tensor.detach()[first:last] if tensor.dim() else tensor.detach()


class _Sharded(sharded.FileSystemReader):
    """Reads its metadata once."""

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is None:
            self._read = super().read_metadata(*args, **kwargs)
        return self._read


def _add_sharded(found: Checkpoint, folder: Path) -> None:
    reader = _Sharded(os.fspath(folder))
    try:
        names = reader.read_metadata().state_dict_metadata
    except Exception as error:  # of pickle: anything
        raise HmpxError(f"{folder}: is no folder of torch.distributed.checkpoint: {error}") from error
    latest: dict[str, Tensor] = {}

    def rows(name: str, told: TensorStorageMetadata, first: int, last: int) -> Tensor:
        if name not in latest:  # a tensor is read as a whole
            latest.clear()
            latest[name] = torch.empty(told.size, dtype=told.properties.dtype)
            sharded.load({name: latest[name]}, storage_reader=reader, no_dist=True)
        return _rows(latest[name], first, last)

    for name, told in names.items():
        found.of_hmpx |= _is_of_hmpx(name)
        if isinstance(told, TensorStorageMetadata):
            found.add(name, Stored(told.properties.dtype, told.size, partial(rows, name, told)))
