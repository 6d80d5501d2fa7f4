"""A hash of what goes into each op and of what comes out, forward and backward: of two runs they tell where these part.

The hash is a sum, modulo 2^64, of the bits of the numbers, each word times a weight of its place modulo a prime. It is
exact in any order of summing, says if numbers changed places, and the hashes of the parts of a tensor add up to that of
the whole. It reads the numbers once. `torch.hash_tensor` says neither and takes 20 times as long on a CPU.

A result is hashed when it is made. Until something writes to its memory, what reads that memory has this hash as its
input, through any view. Memory that no op has made (weights, data) is hashed where it is first read.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hmpx.base.files import write
from hmpx.base.tensors import dtype_name, tensors_in
from hmpx.insight.dispatch import Look
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.report import plain
from hmpx.insight.tensors import has_numbers, memory
from hmpx.ops.wrapping.callers import frames, users_frame
from hmpx.updates.holding.sharding import is_sharded, local, sizes_and_offsets

Tensor = torch.Tensor
SCHEMA = "hashes 2"
_LANES = 1021  # a prime, so that rows of a matrix do not fall onto one another
_SAMPLES = 16
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRAFFIC = os.sep + os.path.join("torch", "distributed") + os.sep
_UNMADE = ("empty", "new_empty", "resize_", "set_")  # ops whose results are not numbers yet
_ELSEWHERE = ("device", "layout", "pin_memory", "non_blocking", "generator", "out")  # arguments


@dataclass
class HashedCall:
    """One call of an op in one iteration.

    Attributes:
        iteration, stage: from 1; "forward" or "backward". What no op has made is a call of the stage "input". The
            gradient of a parameter in a step is one of "gradient", what the step leaves one of "weight". "loss" and
            "traffic" stand for what reads results: a backward pass that begins, and what goes to other ranks.
        op, where, module: its name at torch's dispatcher, or that of the parameter; file:line; the module's name.
        dtypes: of inputs and of results. shapes: of both. settings: other arguments.
        is_random: whether it draws random numbers. offset: where the part of the gradient begins that a rank holds.
        given: the hashes of the inputs. results: of each, the hash, the largest magnitude, 16 of the numbers, and of 16
            blocks the size and the sums of magnitudes; none of a part that a rank holds.
    """

    iteration: int
    stage: str
    op: str
    where: str = ""
    module: str = ""
    dtypes: list[str] = field(default_factory=lambda: ["", ""])
    shapes: str = ""
    settings: str = ""
    is_random: bool = False
    offset: int = 0
    given: list[int] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)

    @property
    def site(self) -> tuple[str, str, str]:
        """Where it is. Files go by their names, as folders differ between machines."""
        return self.stage, os.path.basename(self.where), self.module

    @property
    def hashes(self) -> list[int]:
        return [each[0] for each in self.results]


class Hashes(Look):
    """Hashes the calls of some iterations. The device computes them, and they are read when the iteration is over."""

    stages = ("forward", "backward")

    def __init__(self, iterations: Collection[int]) -> None:
        self._iterations = frozenset(iterations)
        self._calls: list[HashedCall] = []
        self._read = 0  # so many of the calls
        self._losses: list[tuple[int, Tensor]] = []
        self._figures: list[Tensor] = []  # of this iteration: the bits of a hash, extremes and samples, as float64
        self._has_sums: list[bool] = []  # of each of them
        self._made: dict[int, tuple[StorageWeakRef, int, dict[tuple | None, int]]] = {}  # by address: which figures
        self._named: list[tuple[HashedCall, torch.nn.Parameter]] = []
        self._iteration = 0  # of this step
        self._weights: dict[torch.device, Tensor] = {}
        self._compiles = False

    def see(self, notes: Notes, op: OpCall) -> None:
        if notes.iteration not in self._iterations:
            return
        given, is_traffic = _tensors((op.args, op.kwargs)), _is_traffic(op)
        written = _tensors(op.schema.targets(op.args, op.kwargs))
        read = [each for each in given if not any(each is one for one in written)]
        made = [*{id(each): each for each in (*_tensors(op.result), *written)}.values()]
        is_on_its_way = any(each.is_cpu for each in made) and not all(each.is_cpu for each in read)
        if is_traffic or is_on_its_way or op.name.startswith(_UNMADE):
            self._calls.append(HashedCall(notes.iteration, "traffic", op.name, given=self._known(given)))
            for each in (*made, *given) if is_traffic else made:
                self._made.pop(memory(each), None)
        elif written or not {*map(memory, made)} <= {*map(memory, read)}:  # or else it is a view
            self._note(notes, op, read, written, made)

    def _note(
        self, notes: Notes, op: OpCall, read: list[Tensor], written: list[Tensor], results: Sequence[Tensor]
    ) -> None:
        caller = users_frame(op.frame)
        if compiled := caller is not None and "extern_kernels" in caller.f_globals:  # torch.compile's, whose kernels
            self._made.clear()  # write where nobody sees it
        place = notes.forward_of(op.node)[0] or notes.place((compiled and caller and caller.f_back) or op.frame)
        call = HashedCall(
            notes.iteration, op.stage, op.name, place.where, place.module, [_dtypes(read), _dtypes(results)]
        )
        call.shapes, call.is_random = f"{_shapes(read)} -> {_shapes(results)}", _is_random(op)
        call.settings = ", ".join(_settings((op.args, op.kwargs)))[:200]
        call.given = self._known(written)
        for each in read:
            if not (known := self._known([each])):  # no op has made it
                name = notes.names.of_tensor(each, op.frame) or op.name
                given = HashedCall(
                    notes.iteration, "input", name, place.where, place.module, ["", _dtypes([each])], _shapes([each])
                )
                known = given.results = [self._hash(each)]
                self._calls.append(given)
                self._remember(each, known[0], _version(each), _extent(each))
            call.given += known
        self._calls.append(call)
        for each in results:
            call.results.append(self._hash(each))
            is_whole = each.numel() * each.element_size() == each.untyped_storage().nbytes()
            version = _version(each) + any(
                memory(each) == memory(one) for one in written
            )  # counted when the op is over
            self._remember(each, call.results[-1], version, None if is_whole else _extent(each))

    def loss(self, notes: Notes, losses: Sequence[Tensor]) -> None:
        here = [local(each.detach()) for each in losses]
        self._losses += [(notes.iteration, each.sum(dtype=torch.float64)) for each in here]
        if notes.iteration in self._iterations:
            self._calls.append(HashedCall(notes.iteration, "loss", "loss", given=self._known(here)))

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        self._iteration = iteration
        self._of_step("gradient", optimizer)

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        self._of_step("weight", optimizer)
        self._finish()

    def _of_step(self, stage: str, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups if self._iteration in self._iterations else ():
            numbers = (f"{key} {value}" for key, value in group.items() if isinstance(value, int | float | tuple))
            settings = f"{type(optimizer).__name__}: {'; '.join(numbers)}"
            for p in group["params"]:
                whole = p.grad if stage == "gradient" else p
                if whole is None or whole.layout is not torch.strided or not has_numbers(whole):
                    continue
                held, offset = local(whole.detach()), 0
                if is_sharded(whole):
                    sizes, offsets = sizes_and_offsets(whole.shape, whole.device_mesh, whole.placements)
                    if sizes[1:] != whole.shape[1:]:
                        continue  # it is not cut into rows
                    offset = (offsets[0] if offsets else 0) * math.prod(sizes[1:])
                call = HashedCall(self._iteration, stage, "", dtypes=["", _dtypes([held])], shapes=_shapes([whole]))
                call.offset, call.settings, call.given = offset, settings, self._known([held])
                call.results = [self._hash(held, offset, whole.numel(), in_words=False)]
                self._calls.append(call)
                self._named.append((call, p))

    def close(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._finish()

    def _finish(self) -> None:
        """Read the figures of an iteration, those of a device at once."""
        found: dict[int, tuple[int, float, list[float], list[float]]] = {}
        for device in {each.device for each in self._figures}:
            here = [i for i, each in enumerate(self._figures) if each.device == device]
            values = torch.cat([self._figures[i] for i in here]).cpu()
            bits, numbers, end = values.view(torch.int64).tolist(), values.tolist(), 0
            for i in here:
                at, end = end, end + len(self._figures[i])
                some = at + 3 + (1 + _SAMPLES) * self._has_sums[i]
                found[i] = bits[at], max(map(abs, numbers[at + 1 : at + 3])), numbers[some:end], numbers[at + 3 : some]
        for call in self._calls[self._read :]:
            call.given, call.results = [found[i][0] for i in call.given], [found[i] for i in call.results]
        self._read = len(self._calls)
        self._figures.clear()
        self._has_sums.clear()
        self._made.clear()

    def named(self, names: Mapping[torch.nn.Parameter, str], compiles: bool) -> None:
        """Take the names of the parameters, and whether torch.compile has compiled anything."""
        self._compiles = compiles
        numbers = {p: number for number, p in enumerate(dict.fromkeys(p for _, p in self._named))}
        for call, p in self._named:
            call.op = names.get(p, f"parameter {numbers[p]}")

    def json(self, path: str | os.PathLike[str]) -> None:
        """Save the calls, for `report --diff`."""
        device = next(iter(self._weights), torch.device("cpu"))
        about = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "threads": str(torch.get_num_threads()),
            "FP32 products": torch.get_float32_matmul_precision(),
            "deterministic algorithms": "on" if torch.are_deterministic_algorithms_enabled() else "off",
            "torch.compile": "used" if self._compiles else "not used",
        }
        losses = [[i, float(each)] for i, each in self._losses]
        calls = [[*vars(each).values()] for each in self._calls]
        write(path, json.dumps(plain({"schema": SCHEMA, "about": about, "losses": losses, "calls": calls})) + "\n")

    def _known(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return which figures are those of the memory of tensors, where they are known."""
        found = []
        for each in tensors:
            ref, version, figures = self._made.get(memory(each), (None, 0, {}))
            if ref is not None and not ref.expired() and _version(each) == version:
                found += [index for key in (None, _extent(each)) if (index := figures.get(key)) is not None][:1]
        return found

    def _remember(self, tensor: Tensor, index: int, version: int, extent: tuple | None) -> None:
        ref, known, figures = self._made.get(memory(tensor), (None, -1, {}))
        kept = figures if ref is not None and not ref.expired() and known == version else {}
        self._made[memory(tensor)] = StorageWeakRef(tensor.untyped_storage()), version, {**kept, extent: index}

    def _hash(self, tensor: Tensor, offset: int = 0, whole: int = 0, in_words: bool = True) -> int:
        """Compute the figures of a tensor, or of the part of one that begins at an offset; return which they are.

        in_words: add up words of 8 bytes where they fit, which hides where a part begins.
        """
        t = tensor.detach().resolve_conj().resolve_neg()
        dense = _in_order(t)
        flat = (dense if dense.is_contiguous() else t.contiguous()).view(-1)
        count, width = flat.numel(), flat.element_size()
        values = flat.abs() if flat.is_complex() else flat.float() if width == 1 and flat.is_floating_point() else flat
        step = -(-(whole or count) // _SAMPLES) | 1  # odd, or it would stay in one column of a matrix
        at = torch.arange(min(-offset % step, count), count, step, device=t.device)
        ordered = t if values is flat else values  # not as its numbers lie in memory
        some = ordered.take(at)
        if in_words and count * width % 8 == 0:
            flat, width = flat.clone() if flat.storage_offset() * width % 8 else flat, 8
        words = flat.view(_WORDS[min(width, 8)])
        if t.device not in self._weights:
            draw = random.Random(0)
            drawn = [draw.getrandbits(63) | 1 for _ in range(_LANES)]
            self._weights[t.device] = torch.tensor(drawn, device=t.device)
        weights = self._weights[t.device].roll(-offset) if offset else self._weights[t.device]
        rows = len(words) // _LANES
        body, rest = words[: rows * _LANES].view(rows, _LANES), words[rows * _LANES :]
        hashed = (body.sum(0) * weights).sum() + (rest * weights[: len(rest)]).sum()
        found = torch.stack(torch.aminmax(values)) if count else weights[:1] * 0
        size, sums = count // _SAMPLES, []
        self._has_sums.append(size > 0 and whole in (0, count))
        if self._has_sums[-1]:
            inside = ordered.reshape(-1) if ordered.is_floating_point() else ordered.reshape(-1).double()
            whole_blocks, last = inside[: size * _SAMPLES].view(_SAMPLES, size), inside[size * _SAMPLES :]
            blocks = torch.linalg.vector_norm(whole_blocks, 1, 1, dtype=torch.float64)
            blocks[-1] += torch.linalg.vector_norm(last, 1, dtype=torch.float64)
            sums = [blocks.new_tensor([size]), blocks]
        self._figures.append(torch.cat([hashed.view(1).view(torch.float64), found.double(), *sums, some.double()]))
        return len(self._figures) - 1


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tensors_in((value,)) if each.layout is torch.strided and not each.is_meta]


def _settings(value: Any) -> Iterator[str]:
    """Return the arguments that are no tensors: numbers, words and dtypes."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from (f"{name}={said}" for said in _settings(each) if name not in _ELSEWHERE)
    elif isinstance(value, list | tuple):
        yield from (said for each in value for said in _settings(each))
    elif isinstance(value, int | float | str | torch.dtype):
        yield str(value)


def _is_random(op: OpCall) -> bool:
    """Return whether an op draws random numbers: attention does so if it drops some."""
    arguments = op.func._schema.arguments if op.schema.is_random else ()
    at = next((i for i, each in enumerate(arguments) if each.name == "dropout_p"), None)
    share = None if at is None else op.args[at] if at < len(op.args) else op.kwargs.get("dropout_p", 0.0)
    return op.schema.is_random and (share is None or bool(share))


def _is_traffic(op: OpCall) -> bool:
    """Return whether an op moves numbers between ranks, or packs and unpacks what is moved."""
    near = itertools.islice(frames(op.frame), 3)  # Dynamo, if it was imported, stands around a mode's function
    return (
        "c10d" in op.schema.space
        or op.schema.space == "fsdp"
        or any(_TRAFFIC in each.f_code.co_filename for each in near)
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _extent(tensor: Tensor) -> tuple:
    """Return which part of its storage a tensor is, the same for a view in another order."""
    is_dense = _in_order(tensor).is_contiguous()
    return tensor.storage_offset(), *((tensor.numel(),) if is_dense else (*tensor.shape, *tensor.stride()))


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return " and ".join(dict.fromkeys(dtype_name(each.dtype) for each in tensors))


def _shapes(tensors: Iterable[Tensor]) -> str:
    return ", ".join("x".join(map(str, each.shape)) or "1" for each in tensors)
