"""The kernels in Triton, as Python calls them: CUDA, one pass over memory, one launch for a list of tensors.

They take what the C kernels take, and round to the same bits. Triton comes with torch's CUDA builds.
``TRITON_INTERPRET=1`` runs the kernels on the CPU, which is how they are tested where there is no GPU.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import NamedTuple

import torch

from hmpx.rounding import native
from hmpx.rounding.blocks import BlockCodes
from hmpx.rounding.keys import Span, key_of, name_id
from hmpx.rounding.native import BF16, CODED, FOUR, FP8, FP32, Rounding, StepArguments, StoredTensor, is_plain

KERNELS = native.KERNELS
# As in triton_kernels.py: elements of a block of codes, blocks of a program, how elements lie, kinds.
_CODES, _TILE = 128, 8
_UNEVEN, _EVEN, _ALIGNED = range(3)
_ABSENT, _CODED = 0, (CODED, FP8, FOUR)


@functools.cache
def _kernels() -> ModuleType | None:
    """Import the kernels when they are first asked for; None if there is no Triton."""
    try:
        from hmpx.rounding import triton_kernels
    except ImportError:
        return None
    return triton_kernels


def available() -> bool:
    """Return whether Triton can be imported."""
    return _kernels() is not None


def can_read(*tensors: torch.Tensor) -> bool:
    """Return whether the kernels exist and can read these tensors of equal shape."""
    device, shape = tensors[0].device, tensors[0].shape
    on_one = device.type == "cuda" and all(t.device == device and t.shape == shape for t in tensors)
    return on_one and available() and all(map(is_plain, tensors))


class _Lain(NamedTuple):
    """The layout of elements in the parameter, and in the blocks of a tensor with scales.

    Element i of the `size` is element `offset + i // width * stride + i % width` of the parameter. It is element
    `start + i` of rows of `row` elements; such a row is that part of a row of `whole` blocks that begins at `column`.
    """

    size: int
    offset: int
    width: int
    stride: int
    row: int
    whole: int
    start: int = 0
    column: int = 0

    @classmethod
    def in_rows(cls, count: int, offset: int, width: int, stride: int) -> _Lain:
        """Lay out a tensor without scales: a block ends where a row ends."""
        return cls(count, offset, width, stride, min(width, count), _blocks(min(width, count)))

    @classmethod
    def alone(cls, count: int, row: int) -> _Lain:
        """Lay out a whole parameter."""
        return cls(count, 0, count, 0, row, _blocks(row))

    @property
    def is_even(self) -> bool:
        """Return whether the elements follow one another in the parameter, and lie in blocks of `_CODES`."""
        is_full = self.column == 0 and self.row == self.whole * _CODES
        is_one = self.start % self.row + self.size <= self.row and (self.column + self.start) % _CODES == 0
        return self.width >= self.size and (is_full or is_one)

    def words(self, lie: int) -> tuple[int, ...]:
        """Return the words of a row without the first program; the second word counts blocks."""
        if lie != _UNEVEN:
            blocks = _blocks(self.size + self.offset % 2)
            return self.size, blocks, self._block(self.start, self.whole), self.offset, *(0,) * 6
        parts = _blocks(self.column % _CODES + self.row)
        first, last = (self._block(i, parts) for i in (self.start, self.start + self.size - 1))
        left = self.column // _CODES
        rest = self.row, self.column, self.whole, self.start, self.width, self.stride
        return self.size, last - first + 1, first - left, self.offset, *rest

    def _block(self, element: int, of_a_row: int) -> int:
        row, column = divmod(element, self.row)
        return row * of_a_row + (self.column + column) // _CODES


def _blocks(count: int) -> int:
    return -(-count // _CODES)


class _Part(NamedTuple):
    """One row of a table: tensors whose elements lie in one way, with their keys."""

    lain: _Lain
    tensors: tuple[StoredTensor | None, ...]
    keys: tuple[int, ...]
    scalars: tuple[float, ...] = ()

    def alike(self) -> tuple[int, ...]:
        """Return what the kernels are compiled for: kinds of tensors, and how elements lie."""
        kinds = tuple([_ABSENT if held is None else held.kind for held in self.tensors])
        there = [held for held in self.tensors if held is not None]
        lain, is_coded = self.lain, any(abs(held.kind) in _CODED for held in there)
        lie = _EVEN if lain.is_even and not (is_coded and lain.offset % 2) else _UNEVEN
        if lie == _EVEN and not (
            lain.size % 16 or lain.offset % 2 or any(a % 16 for h in there for a in _addresses(h))
        ):
            lie = _ALIGNED
        return *kinds, lie


def _addresses(held: StoredTensor) -> list[int]:
    return [0 if each is None else each.data_ptr() for each in (held.tensor, held.beside)]


def _launch(kernel: str, parts: Iterable[_Part], *constants: int) -> None:
    """Launch once for each group of equal kernel arguments, which is nearly always one group."""
    lists: dict[tuple[int, ...], list[_Part]] = {}
    for part in parts:
        if part.lain.size:
            lists.setdefault(part.alike(), []).append(part)
    for kinds, alike in lists.items():
        _start(kernel, alike, *constants, *kinds)


def _start(kernel: str, parts: list[_Part], *constants: int) -> None:
    """Launch a kernel once."""
    words, scalars, programs = array("Q"), array("f"), 0
    for lain, tensors, keys, own in parts:
        where = lain.words(constants[-1])
        words.extend((programs, *where))
        for held, key in zip(tensors, keys, strict=True):
            at, beside = (0, 0) if held is None else _addresses(held)
            words.extend((at, key, beside))
        scalars.extend(own)
        programs += -(-where[1] // _TILE)
    first = next(held.tensor for held in parts[0].tensors if held is not None)
    with torch.cuda.device_of(first):  # Triton launches on the current device, which may be another one
        table = _on(first.device, words, torch.int64), len(parts)
        numbers = [_on(first.device, scalars, torch.float32)] if scalars else []
        getattr(_kernels(), kernel)[(programs,)](*table, *numbers, *constants, enable_fp_fusion=False)


def _on(device: torch.device, numbers: array, dtype: torch.dtype) -> torch.Tensor:
    """Copy to the device. The CPU waits only while a CUDA graph is captured, which fails: it would not copy again."""
    host = torch.frombuffer(numbers, dtype=dtype)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=not torch.cuda.is_current_stream_capturing())


def _move(lain: _Lain, source: StoredTensor, target: StoredTensor, key: int = 0) -> _Part:
    return _Part(lain, (source, target), (0, key))


def round_list(roundings: Sequence[Rounding], step_key: int) -> None:
    """Round all of them, which are on one device, in one launch; as `native.round_list`."""
    parts = []
    for out, x, name, offset, width, stride in roundings:
        lain = _Lain.in_rows(x.numel(), offset & 0xFFFFFFFF, width or x.numel(), stride)
        key = key_of(step_key, name_id(name), offset >> 32)
        parts.append(_move(lain, StoredTensor(x, FP32), StoredTensor(out, BF16), key))
    _launch("move_list", parts)


def encode_codes(kind: int, held: BlockCodes, x: torch.Tensor, spans: Sequence[Span], key: int, given: bool) -> None:
    """Do what `native.encode_codes` does."""
    codes, scales, (row, column, whole), start = held
    parts, each = [], 2 if kind == FOUR else 1
    for first, last, offset, width, stride in spans:
        lain = _Lain(last - first, offset, width, stride, row, whole, start + first, column)
        part = StoredTensor(codes[first // each : last // each], -kind if given else kind, beside=scales)
        parts.append(_move(lain, StoredTensor(x[first:last], FP32), part, key))
    _launch("move_list", parts)


def decode_codes(kind: int, held: BlockCodes, out: torch.Tensor) -> None:
    """Do what `native.decode_codes` does."""
    codes, scales, (row, column, whole), start = held
    count = out.numel()
    lain = _Lain(count, 0, count, 0, row, whole, start, column)
    _launch("move_list", [_move(lain, StoredTensor(codes, kind, beside=scales), StoredTensor(out, FP32))])


class Move(NamedTuple):
    """`size` elements of a tensor from `start` on, where a block of codes begins; in FP32 at `x`."""

    held: StoredTensor
    start: int
    size: int
    x: torch.Tensor

    def of(self, tensor: torch.Tensor) -> Move:
        """Return the same elements of another tensor that is held in the same way."""
        return self._replace(held=self.held._replace(tensor=tensor))

    def lain(self) -> _Lain:
        row = self.held.row or self.held.size
        return _Lain(self.size, self.start, self.size, 0, row, _blocks(row), self.start)

    def part(self) -> StoredTensor:
        """Return these elements alone; scales of codes stay those of the whole tensor."""
        held, own = self.held, slice(self.start, self.start + self.size)
        beside = held.beside if held.beside is None or held.kind in _CODED else held.beside.view(-1)[own]
        own = slice(own.start // 2, own.stop // 2) if held.kind == FOUR else own
        return held._replace(tensor=held.tensor.view(-1)[own], beside=beside)


def read_list(moves: Sequence[Move]) -> None:
    """Read all of them, which are on one device, to FP32."""
    _launch("move_list", [_move(each.lain(), each.part(), StoredTensor(each.x, FP32)) for each in moves])


def write_list(moves: Sequence[Move], step_key: int) -> None:
    """Write them back."""
    parts = []
    for each in moves:
        parts.append(_move(each.lain(), StoredTensor(each.x, FP32), each.part(), key_of(step_key, each.held.name)))
    _launch("move_list", parts)


def step_list(kernel: str, stepped: Sequence[StepArguments], step_key: int) -> None:
    """Step all of these parameters, which are on one device, in place by one of `KERNELS`; as `native.step_list`."""
    parts = []
    for each in stepped:
        lain = _Lain.alone(each.weight.tensor.numel(), each.row)
        held = each.tensors()
        keys = tuple([0 if tensor is None else key_of(step_key, tensor.name) for tensor in held])
        parts.append(_Part(lain, held, keys, native.scalars_of(each.scalars)))
    _launch("step_list", parts, KERNELS.index(kernel))
