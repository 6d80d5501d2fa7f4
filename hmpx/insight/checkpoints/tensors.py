"""Every tensor of one or two checkpoints is read once, a part at a time: what its numbers are, and how they moved.

An optimizer moves a weight by about as much whether the weight is large or small. Small weights have a fine grid, on
which rounding hides nothing. So the distances that the finest weights moved, rounded to the grid of each other weight,
are what a file shows where nothing was lost. `kept` is the distance that was moved over this: 1 is healthy, 0 is dead.
Stochastic rounding adds its noise to the distance, and gives more than 1.

A checkpoint is opened as it lies on a disk: names, dtypes and shapes at once, numbers a few rows at a time.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed import checkpoint as sharded
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hmpx.errors import HmpxError
from hmpx.insight.tensors import LOW, exponents_of, ulp
from hmpx.updates.stepping.step_count import STEP_KEY

Tensor = torch.Tensor

FEWEST = 256  # weights whose movement is judged
_FINEST, _FEWEST_FINE = 0.05, 64  # the share of the weights whose distances count as seen, and how few these may be
_CLEAR = 4  # ulp that such a distance should have


@dataclass(frozen=True)
class Movement:
    """How far a tensor's weights moved, from one checkpoint to the next.

    Attributes:
        count: weights that are judged: none that is zero, and none in a row where nothing moved.
        still_rows: the share of the rows in which nothing moved.
        moved: the share of the judged weights that are not as they were.
        size: the sum of their magnitudes. went: the sum of their distances. expected: what this would be if no update
            had been lost; NaN where that is not known. fine: the median distance of the finest weights; NaN likewise.
        unclear: why it is not known.
    """

    count: int
    still_rows: float
    moved: float
    size: float
    went: float
    expected: float = math.nan
    fine: float = math.nan
    unclear: str = ""

    @property
    def kept(self) -> float:
        return self.went / self.expected


def movement(before: Tensor, after: Tensor, dtype: torch.dtype) -> Movement:
    """Return how far weights went. before, after: rows, in FP32. dtype: whose numbers `after` holds."""
    distances = (after - before).abs().flatten(1)
    rows = distances.amax(1) > 0
    still_rows = 1 - rows.float().mean().item()
    weights, distances = before.flatten(1)[rows], distances[rows]
    distances, weights = distances[weights != 0], weights[weights != 0]
    count, moved = len(distances), (distances > 0).float().mean().item()
    found = Movement(count, still_rows, moved, weights.abs().double().sum().item(), distances.double().sum().item())
    if count < FEWEST:
        return replace(found, unclear=f"fewer than {FEWEST} weights moved")
    exponents = exponents_of(weights, dtype)
    least = exponents.min()
    counts = (exponents - least).bincount()
    if len(counts) < 2:
        return replace(found, unclear="all weights are of one size")
    grid = ulp(torch.ldexp(torch.ones(len(counts)), torch.arange(len(counts)) + least), dtype)
    upto, share = counts.cumsum(0), _FINEST
    while True:
        fine = exponents - least <= (upto < max(share * count, _FEWEST_FINE)).sum()
        seen = distances[fine]
        if (seen / grid[exponents[fine] - least]).median() >= _CLEAR or share * count <= _FEWEST_FINE:
            break
        share /= 2
    expected = sum(
        ((seen / each).round().double().mean() * each * number).item()
        for each, number in zip(grid, counts, strict=True)
        if number
    )
    if not expected:
        return replace(found, unclear="the finest weights did not move")
    return replace(found, expected=expected, fine=seen.median().item())


_PART = 2**24  # weights that are read at a time, or one row
_SAMPLE = 2**19  # weights of a tensor whose distances are looked at
_LONG_ROW = 256  # the last dimension is a row's, and not a kernel's
_PRUNED = 0.05  # the share of weights that have become zero
_OTHER = 1.0  # the distance that weights moved, over their size: of two trainings it is 1.4


class Numbers:
    """The numbers of a tensor.

    Attributes:
        is_finite: whether none is inf or NaN, but for -inf beside 0 alone. dtype: the narrowest that holds them all.
            one: their value, if all have one; else None. Multiples of one number (masks, bins, codes) are in the dtype
            that they are stored in.
    """

    def __init__(self, stored: Stored) -> None:
        self._is_finite = self._is_mask = self._are_multiples = True
        self._low = [torch.bfloat16, torch.float16] if stored.dtype is torch.float32 else []
        self._stored, self._least, self._most = stored.dtype, float("inf"), -float("inf")

    def see(self, part: Tensor) -> None:
        least, most = (each.item() for each in part.aminmax())
        self._is_finite &= abs(least) < float("inf") and abs(most) < float("inf")  # not so for NaN either
        self._is_mask = self._is_mask and most <= 0 and not part[part != -float("inf")].any()
        self._least, self._most = min(self._least, least), max(self._most, most)
        self._low = [each for each in self._low if torch.equal(part.to(each).float(), part)]
        if self._low and self._are_multiples:
            sizes = part[(part != 0) & (part > -float("inf"))].abs()
            counts = sizes / sizes.amin() if len(sizes) else sizes
            self._are_multiples = torch.equal(counts, counts.round())

    @property
    def is_finite(self) -> bool:
        return self._is_finite or (self._is_mask and self._most == 0)

    @property
    def dtype(self) -> torch.dtype:
        return self._low[0] if self._low and not self._are_multiples else self._stored

    @property
    def one(self) -> float | None:
        return self._most if self._least == self._most else None


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the last checkpoint, beside the one that it was before.

    Attributes:
        name, shape, count: of the tensor, and how many numbers it has. dtypes: as stored, before and after; only one,
            if nothing was before.
        numbers: of the tensor. were: of the tensor before; None if there is none.
        is_same: whether not one number moved. zeroed: the share of its numbers that are zero now, and were not.
        moved: how its weights moved; None if it has no rows of weights, or is as it was.
        ulp: of the median weight. lost: the share of its weights that a step of the given rate, rounded to nearest,
            leaves where they are.
    """

    name: str
    shape: torch.Size
    dtypes: tuple[torch.dtype, ...]
    numbers: Numbers
    were: Numbers | None
    is_same: bool
    zeroed: float
    moved: Movement | None
    ulp: float
    lost: float

    @property
    def count(self) -> int:
        return self.shape.numel()

    @property
    def is_vector(self) -> bool:
        """Whether it is a norm or a bias."""
        return len(self.shape) == 1 and not self.name.endswith(("running_mean", "running_var"))

    @property
    def why_not(self) -> str:
        """Why its movement does not tell whether updates were lost; "" if it does."""
        if self.moved is None:
            return "it did not move"
        if self.zeroed > _PRUNED:
            return f"pruned ({100 * self.zeroed:.0f} % of it is zero now)"
        if self.moved.went > _OTHER * self.moved.size:
            return "weights moved as far as they are large, as those of another training"
        return self.moved.unclear

    @property
    def tells(self) -> bool:
        """Whether its movement tells whether updates were lost. FP32 loses none."""
        return not self.why_not and self.numbers.dtype in LOW


class Bar:
    """How much is read, on standard error, where that is a terminal."""

    def __init__(self, whole: int) -> None:
        self._whole, self._done, self._began, self._is_drawn = whole, 0, perf_counter(), sys.stderr.isatty()

    def add(self, count: int) -> None:
        self._done += count
        if self._is_drawn:
            seconds = perf_counter() - self._began
            left = f", {seconds * (self._whole / self._done - 1):.0f} s left" if seconds > 1 else ""
            line = f"doctor: {100 * self._done / self._whole:3.0f} % of {self._whole / 1e6:.0f} M numbers{left}"
            print(f"\r{line:78}", end="" if self._done < self._whole else "\r" + " " * 78 + "\r", file=sys.stderr)


def _parts(shape: torch.Size) -> Iterator[tuple[int, int]]:
    rows = shape[0] if shape else 1
    at_once = max(1, _PART // max(1, shape[1:].numel()))
    return ((first, min(first + at_once, rows)) for first in range(0, rows, at_once))


def _sampled(part: Tensor, whole: int) -> Tensor:
    """Return rows of a part of a tensor that has `whole` numbers: all, or as many as make a sample."""
    if part.dim() < 2:
        part = part.reshape(-1, 1)
    rows = part.flatten(0, -2) if part.shape[-1] >= _LONG_ROW else part.flatten(1)
    return rows[:: -(-whole // _SAMPLE)].float()


def seen(name: str, before: Stored | None, after: Stored, rate: float, bar: Bar) -> FileTensor:
    """Read a tensor, and the one before it that has its shape. rate: of a step; 0 where it is not known."""
    numbers, were = Numbers(after), Numbers(before) if before else None
    is_same, samples = before is not None, []
    for first, last in _parts(after.shape):
        part = after.rows(first, last)
        if not part.numel():
            continue
        numbers.see(part)
        old = before.rows(first, last) if before else None
        if old is not None and were:
            were.see(old)
            is_same = is_same and torch.equal(old.to(part.dtype), part)
        samples.append([_sampled(each, after.shape.numel()) for each in (part, old) if each is not None])
        bar.add(part.numel() * (1 + (old is not None)))
    dtypes = tuple(each.dtype for each in (before, after) if each)
    now, *earlier = (torch.cat(each) for each in zip(*samples, strict=True)) if samples else (torch.empty(0, 1),)
    weights = earlier[0] if earlier else now
    digits = ulp(weights, numbers.dtype).flatten()
    digit, lost = (digits.median().item(), (digits > 2 * rate).float().mean().item()) if len(digits) else (0.0, 0.0)
    zeroed, moved = 0.0, None
    if len(after.shape) > 1 and earlier and not is_same and numbers.is_finite and were and were.is_finite:
        zeroed = ((now == 0) & (weights != 0)).float().mean().item()
        moved = movement(weights.to(numbers.dtype).float(), now, numbers.dtype)
    return FileTensor(name, after.shape, dtypes, numbers, were, is_same, zeroed, moved, digit, lost)


_INDICES = "model.safetensors.index.json", "pytorch_model.bin.index.json"
_FILES = "*.safetensors", "*.bin", "*.pt", "*.pth"
_STATE = "optimizer.pt", "optimizer.bin"  # beside the weights, in a folder of a trainer
_AROUND = "_orig_mod", "module"  # parts of a name: of `torch.compile`, of DDP
_MOST_FRONTS = 8  # that are tried


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
        for name in tensors.keys():  # noqa: SIM118  it is no dict
            part = tensors.get_slice(name)
            shape = torch.Size(part.get_shape())
            whole = partial(_rows, tensors.get_tensor(name)) if not shape else None
            rows = whole or (lambda first, last, part=part: part[first:last])
            found.add(name, Stored(rows(0, 0).dtype, shape, rows))
    except (SafetensorError, OSError) as error:
        raise HmpxError(f"{file}: cannot be read: {error}") from error


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
