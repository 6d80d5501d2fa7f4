"""Tables tell the kernels where tensors are and how they lie, in rows of words. C and Triton read the same words.

A table is made once for all launches of a step on one device, and is kept from one step to the next. Before a step, the
changed words are filled in, one kind at a time: addresses of gradients, keys, scalars, the address of a room. To a GPU,
one copy sends all words. So the host makes the same few calls for any number of tensors.

A row is work for a kernel: a rounding, a move to FP32 or back, the step of a parameter. `kernels` is the module whose
kernels do it, `native` or `triton`; both give the same bits.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from hmpx.rounding import native, triton
from hmpx.rounding.native import StepArguments, StoredTensor
from hmpx.rounding.shared import ABSENT, BF16, CODES, FP32, KERNELS, SPLIT8

# These must equal those of triton_kernels.py: elements in a block, blocks of a program, how elements lie, kinds.
_BLOCK, _TILE = 128, 8
_UNEVEN, EVEN, _ALIGNED = range(3)
# A row has 7 words of 8 bytes, then 4 for each tensor:
#   0         the number of its first program, in Triton
#   1 to 6    size, blocks, offset, row, width, stride (`RowLayout.words`)
#   7 + 4 i   of tensor i: its address, its key, the address of what is beside it, its kind
# The scalars of all rows of a launch come after the rows: `SCALARS` FP32 numbers for each, two in a word.
_HEAD, _STORED, _KEY = 7, 4, 1  # words in the head; words of each tensor; which of them is its key
WORDS_OF_A_MOVE = _HEAD + 2 * _STORED
_SCALARS = native.SCALARS // 2  # words for the scalars of a row, two in each
_BYTES = 8  # in a word
_MULTIPLES = bytes(range(0, 256, 16))
_NONE = array("Q")


class RowLayout(NamedTuple):
    """The layout of `size` elements: where they stand in the parameter, and in the blocks of a tensor with scales.

    Element i is element `offset + i // width * stride + i % width` of the parameter. A block begins every `_BLOCK`
    elements of each row of `row` elements.
    """

    size: int
    offset: int
    width: int
    stride: int
    row: int

    @property
    def is_even(self) -> bool:
        """Whether the elements follow one another in the parameter, and lie in blocks of `_BLOCK`."""
        return self.width >= self.size and (self.row % _BLOCK == 0 or self.size <= self.row)

    def words(self, lie: int) -> tuple[int, ...]:
        """Return the words of this layout, but not that of the first program. The second is the number of blocks."""
        row, column = divmod(self.size - 1, self.row)
        uneven = row * _blocks(self.row) + column // _BLOCK + 1
        blocks = uneven if lie == _UNEVEN else _blocks(self.size + self.offset % 2)
        return self.size, blocks, self.offset, self.row, self.width, self.stride


def _blocks(count: int) -> int:
    return -(-count // _BLOCK)


class TableRow(NamedTuple):
    """Tensors that share one layout, to become one row of words.

    Attributes:
        keys: for each tensor, the key of its random numbers; None if it needs none.
        by_name: whether `keys` are ids of names instead. Each step makes the keys from them.
        scalars: those of the optimizer's step, if they are known already.
        grad: the index of the gradient in `tensors`, and its index among all gradients.
        room: the index in `tensors` of the tensor that lies in a room, and the byte of the room with which it begins.
    """

    layout: RowLayout
    tensors: tuple[StoredTensor | None, ...]
    keys: tuple[int | None, ...]
    by_name: bool = False
    scalars: tuple[float, ...] = ()
    grad: tuple[int, int] | None = None
    room: tuple[int, int] | None = None

    def alike(self) -> tuple[int, ...]:
        """Return what Triton compiles a kernel for: the kinds of the tensors, and how their elements lie."""
        kinds = tuple([ABSENT if held is None else held.kind for held in self.tensors])
        there = [held for held in self.tensors if held is not None]
        layout, is_coded = self.layout, any(held.kind in CODES for held in there)
        lie = EVEN if layout.is_even and not (is_coded and layout.offset % 2) else _UNEVEN
        if lie == EVEN and not (
            layout.size % 16 or layout.offset % 2 or any(a % 16 for h in there for a in _addresses(h))
        ):
            lie = _ALIGNED
        return *kinds, lie

    def words(self, first: int, where: tuple[int, ...]) -> list[int]:
        """Return the words of the row. first: the number of its first program. where: the words of its layout."""
        words = [first, *where]
        for held, key in zip(self.tensors, self.keys, strict=True):
            if held is None:
                words += 0, 0, 0, ABSENT
            else:
                beside = 0 if held.beside is None else held.beside.data_ptr()
                words += held.tensor.data_ptr(), 0 if self.by_name or key is None else key, beside, held.kind
        return words


def _addresses(held: StoredTensor) -> list[int]:
    return [0 if each is None else each.data_ptr() for each in (held.tensor, held.beside)]


def row_of_rounding(
    out: torch.Tensor, x: torch.Tensor, key: int, offset: int, width: int = 0, stride: int = 0
) -> TableRow:
    """Return the row that does what `stochastic.round_` does."""
    width = width or x.numel()
    layout = RowLayout(x.numel(), offset, width, stride, min(width, x.numel()))
    return TableRow(layout, (StoredTensor(x, FP32), StoredTensor(out, BF16)), (None, key))


def row_of_move(
    held: StoredTensor,
    x: torch.Tensor,
    first: int = 0,
    *,
    is_read: bool,
    grad: int | None = None,
    room: int | None = None,
) -> TableRow:
    """Return the row that reads a held tensor into FP32 `x`, or writes it from `x` by its step's key.

    Args:
        first: the index in the whole parameter of the first element of `held`, if `held` is a part of it.
        grad: the index of `held` among all gradients, if it is one: each step has its gradients at other addresses.
        room: where in a room `x` begins, in bytes, if `x` lies in one.
    """
    size, own = x.numel(), StoredTensor(x, FP32)
    layout = RowLayout(size, first, size, 0, held.row or size)
    in_room = None if room is None else (int(is_read), room)
    if not is_read:
        return TableRow(layout, (own, held), (None, _drawn(held)), by_name=True, room=in_room)
    of_grad = None if grad is None else (0, grad)
    return TableRow(layout, (held, own), (None, None), grad=of_grad, room=in_room)


def row_of_step(one: StepArguments, grad: int | None = None) -> TableRow:
    """Return the row that steps a parameter; `grad`: the index of its gradient, if each step has another one."""
    size, held = one.weight.tensor.numel(), one.tensors()
    layout = RowLayout(size, one.first, size, 0, one.row)
    drawn = tuple(map(_drawn, held))
    return TableRow(layout, held, drawn, by_name=True, scalars=one.scalars, grad=None if grad is None else (1, grad))


_DRAWN = BF16, SPLIT8, *CODES  # kinds whose writes need random numbers


def _drawn(held: StoredTensor | None) -> int | None:
    """Return the name from which a tensor's random numbers come; None if writing it needs none."""
    return held.name if held is not None and held.kind in _DRAWN else None


class _Places:
    """Places in a table. The word at each place is the address of a tensor, given by its index, plus an offset."""

    def __init__(self) -> None:
        self._places, self._indices, self._offsets = array("q"), array("q"), array("q")
        self._each, self._slices = 0, list[slice]()

    def add(self, place: int, index: int, offset: int = 0) -> None:
        self._places.append(place)
        self._indices.append(index)
        self._offsets.append(offset)

    def fix(self) -> None:
        """Prepare `fill`, after the last `add`. Most launches have all tensors in order, at even distances."""
        places, indices, count = self._places, self._indices, len(self._places)
        if not count:
            return
        self._tensors = [_as_tensor(numbers) for numbers in (places, indices, self._offsets)]
        each = next((i for i in range(1, count) if not indices[i]), count)  # how many places a launch has
        if indices == array("q", range(each)) * (count // each) and not any(self._offsets):
            runs = [places[i : i + each] for i in range(0, count, each)]
            slices = [slice(run[0], run[-1] + 1, run[1] - run[0] if each > 1 else 1) for run in runs]
            if all(
                [run.tolist() == list(range(at.start, at.stop, at.step)) for run, at in zip(runs, slices, strict=True)]
            ):
                self._each, self._slices = each, slices

    def fill(self, words: array[int], addresses: array[int]) -> None:
        """Write the word at each place. addresses: those of all tensors, by index."""
        if self._slices and len(addresses) == self._each:
            for part in self._slices:
                words[part] = addresses
        elif self._places:
            places, indices, offsets = self._tensors
            given = _as_tensor(addresses).index_select(0, indices)
            _as_tensor(words).index_copy_(0, places, given.add_(offsets))


def _as_tensor(numbers: array[int]) -> torch.Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64)


class Launch:
    """Rows that go to a kernel together. In Triton, one compiled kernel must serve all of them.

    Attributes:
        rows: for each of its rows, the index among the rows that were given to `Table.add`.
        programs: for each of its rows, how many programs share the blocks of it, in Triton.
        at, end: where the words of its rows begin and end in the table.
    """

    def __init__(self, kernel: str, constants: tuple[int, ...], programs: list[int], at: int, end: int) -> None:
        self._kernel, self._constants, self._grid = kernel, constants, (sum(programs), 1, 1)
        self.programs, self.count, self.at, self.end = programs, len(programs), at, end
        self.rows: list[int] = []
        self._args: tuple[Any, ...] = ()
        self._compiled: Callable[..., object] | None = None

    def lie_in(self, table: torch.Tensor) -> None:
        """Remember the place of the words on the device. Send there the row number of each program."""
        words, rows = table[self.at : self.end], None
        if self.count > 1:
            numbers = torch.arange(self.count, dtype=torch.int32, device="cpu")
            rows = numbers.repeat_interleave(torch.tensor(self.programs, device="cpu")).to(table.device)
        self._args = words, rows
        if self._kernel == "step_list":
            self._args += (words[-_SCALARS * self.count :].view(torch.float32),)

    def around(self) -> AbstractContextManager[Any]:
        """Return the context for calls of `run`. It sets the current device, on which Triton launches."""
        return torch.cuda.device_of(self._args[0])

    def run(self) -> None:
        """Launch the kernel. Before this, the caller has sent the words."""
        if self._compiled is None:
            self._compiled = triton.start(self._kernel, self._grid, self._args, self._constants)
        else:
            self._compiled(*self._args, *self._constants)


class Call(Launch):
    """A launch of a C kernel. One call takes rows of all kinds."""

    def begin_at(self, address: int) -> None:
        """Remember the address of the table, which never moves."""
        self._args = address + _BYTES * self.at, self.count
        if self._kernel == "step_list":
            self._args += (self._constants[0], address + _BYTES * (self.end - _SCALARS * self.count))

    def around(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def run(self) -> None:
        native.start(self._kernel, *self._args)


def run_all(launches: Sequence[Launch]) -> None:
    """Run these launches, all of one table."""
    if launches:
        with launches[0].around():
            for launch in launches:
                launch.run()


class Table:
    """The words of all launches of a step on one device, by the kernels in C or in Triton."""

    def __init__(self, device: torch.device, kernels: ModuleType) -> None:
        self._device, self._in_c, self._words = device, kernels is native, array("Q")
        self._names, self._keys = array("Q"), array("Q")  # of rounded tensors: ids of names, places of keys
        self._grads, self._in_room = _Places(), _Places()
        self._aligned = list[int]()  # indices of the gradients whose addresses must stay multiples of 16
        self._launches: list[Launch] = []
        self._is_fixed, self._room = False, 0
        self._sent: torch.Tensor

    def add(self, kernel: str, rows: Iterable[TableRow], *constants: int) -> list[Launch]:
        """Add rows in one launch. Triton compiles a kernel for each kind of rows: there, each kind has its launch."""
        lists: dict[tuple[int, ...], list[tuple[int, TableRow]]] = {}
        for i, row in enumerate(rows):
            if row.layout.size:
                lists.setdefault((EVEN,) if self._in_c else row.alike(), []).append((i, row))
        launches = []
        for kinds, alike in lists.items():
            launches.append(self._add(kernel, [row for _, row in alike], (*constants, *kinds)))
            launches[-1].rows = [i for i, _ in alike]
        self._launches += launches
        return launches

    def _add(self, kernel: str, rows: list[TableRow], constants: tuple[int, ...]) -> Launch:
        words, begin, programs, first = self._words, len(self._words), list[int](), 0
        for row in rows:
            where, place = row.layout.words(constants[-1]), len(words) + _HEAD
            words.extend(row.words(first, where))
            if row.by_name:  # `send` writes these words before each step: the keys, the gradients, what is in the room
                named = [(key, place + _STORED * i + _KEY) for i, key in enumerate(row.keys) if key is not None]
                self._names.extend([key for key, _ in named])
                self._keys.extend([at for _, at in named])
            if row.grad is not None:
                self._grads.add(place + _STORED * row.grad[0], row.grad[1])
                if constants[-1] == _ALIGNED:
                    self._aligned.append(row.grad[1])
            if row.room is not None:
                self._in_room.add(place + _STORED * row.room[0], 0, row.room[1])
            programs.append(-(-where[1] // _TILE))
            first += programs[-1]
        words.extend((0,) * (len(words) % 2))
        if kernel == "step_list":
            words.extend((0,) * (_SCALARS * len(rows)))
        launch = (Call if self._in_c else Launch)(kernel, constants, programs, begin, len(words))
        if kernel == "step_list":
            self.scale(launch, [row.scalars for row in rows])
        return launch

    def scale(self, launch: Launch, scalars: Sequence[tuple[float, ...]]) -> None:
        """Fill in the scalars of the rows of a launch."""
        padded = array("Q", native.padded(scalars).tobytes())
        self._words[launch.end - _SCALARS * launch.count : launch.end] = padded

    @property
    def has_launches(self) -> bool:
        return bool(self._launches)

    def are_aligned(self, addresses: array[int]) -> bool:
        """Return whether gradients are at multiples of 16 bytes where the compiled kernel counts on that."""
        lowest = addresses.tobytes()[:: addresses.itemsize]  # the lowest byte of each address tells it
        return not lowest.translate(None, _MULTIPLES) or not any([lowest[i] % 16 for i in self._aligned])

    def send(self, step_key: int | None = None, grads: array[int] = _NONE, room: int = 0) -> None:
        """Fill in this step's keys, addresses of gradients and address of the room. Copy all words to the device."""
        if not self._is_fixed:
            self._fix()
        if step_key is not None:
            native.put_keys(self._words, self._keys, self._names, step_key)
        self._grads.fill(self._words, grads)
        if room != self._room:
            self._in_room.fill(self._words, array("Q", (room,)))
            self._room = room
        if not self._in_c:
            _send(_as_tensor(self._words), self._sent)

    def _fix(self) -> None:
        """Prepare `send`, after the last `add`."""
        self._grads.fix()
        self._in_room.fix()
        if not self._in_c:
            self._sent = torch.empty(len(self._words), dtype=torch.int64, device=self._device)
        for launch in self._launches:
            if isinstance(launch, Call):
                launch.begin_at(self._words.buffer_info()[0])
            else:
                launch.lie_in(self._sent)
        self._is_fixed = True


class Tables(dict[torch.device, Table]):
    """The table of each device."""

    def of(self, device: torch.device, kernels: ModuleType) -> Table:
        return self.get(device) or self.setdefault(device, Table(device, kernels))


def _send(host: torch.Tensor, sent: torch.Tensor) -> None:
    """Copy to the device, without a wait. A captured graph would not copy anew, so a wait makes its capture fail."""
    if sent.is_cuda:  # a pinned copy of its own, 20 us, as the next step may fill in words while this one is on its way
        sent.copy_(host.pin_memory(), non_blocking=not torch.cuda.is_current_stream_capturing())
    else:
        sent.copy_(host)


def launch_once(
    kernels: ModuleType,
    rows: Sequence[TableRow],
    kernel: str = "move_list",
    step_key: int | None = None,
    *constants: int,
) -> None:
    """Launch a kernel on rows of one device that are needed only once."""
    if kernels is native and kernel == "move_list":
        words = array("Q")
        for row in rows:
            words.extend(row.words(0, row.layout.words(EVEN)) if row.layout.size else ())
        native.start("move_list", words.buffer_info()[0], len(words) // WORDS_OF_A_MOVE)
        return
    device = next((held.tensor.device for row in rows for held in row.tensors if held is not None), None)
    if device is not None:
        table = Table(device, kernels)
        launches = table.add(kernel, rows, *constants)
        if launches:
            table.send(step_key)
        run_all(launches)


def step_list(kernels: ModuleType, kernel: str, stepped: Sequence[StepArguments], step_key: int) -> None:
    """Step all of these parameters, which are on one device, in place by one of `KERNELS`."""
    launch_once(kernels, list(map(row_of_step, stepped)), "step_list", step_key, KERNELS.index(kernel))
