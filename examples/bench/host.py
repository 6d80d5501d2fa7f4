"""``bench host``: what a step costs the host, beside torch's own fused step, in turns in one run.

On a GPU the kernels of a step take the time that memory takes, and Python for each tensor may take many times as long.
Where there is no GPU, `no_gpu` takes its place: all of the host's work is done, and nothing is launched (but for rows
of unknown classes, which step small tensors on the CPU).

Times are the least of some steps, each with gradients at other addresses. A released step is a backward pass through
functions that give gradients without computing them, less the same pass without hooks, and `optimizer.step()`.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import measure
from bench.models import Shape, gpt
from bench.no_gpu import no_gpu
from bench.unknown import UNKNOWN
from hmpx.updates.attach import attach, detach
from hmpx.updates.holding.state_forms import STATE_FORMS, state_name
from hmpx.updates.holding.stores import WAYS as WEIGHTS

BF16 = torch.bfloat16
TENSORS = 20, 293, 1000
_NUMBERS = 293, 1000  # of tensors, for which most limits are
_STEPPED = 20_000  # tensors at least, for each figure: the least of few steps is of no quiet moment
_PROFILED = 293  # tensors whose kernels are timed too; a look takes the profiler half a second


Limits = tuple[tuple[str, float, Sequence[int]], ...]  # column, the largest figure in it, for these numbers of tensors
FP32_STATE: Limits = (("ratio", 1.1, _NUMBERS), ("ratio", 2.0, (20,)), ("device ratio", 0.7, (293,)))
FUSED: Limits = (("ratio", 1.4, _NUMBERS),)
OWN: Limits = (("ratio", 4.0, (293,)),)
UNKNOWN_FP32: Limits = (("ratio", 1.6, _NUMBERS),)
UNKNOWN_IN_COPIES: Limits = (("ratio", 2.5, _NUMBERS),)
RELEASED_FUSED: Limits = (("us/tensor", 25.0, (293,)),)
RELEASED: Limits = (("us/tensor", 60.0, (293,)),)


class HostWay(NamedTuple):
    """How AdamW is stepped.

    options: of `attach`; None: torch's own step, of FP32 weights.
    kind: of parameters, ``plain``, ``DDP`` (gradients are views of its buckets) or ``FSDP2``.
    unknown: steps small parameters by this class of `UNKNOWN` and not by AdamW, beside the class without hmpx. On a CPU
        they are computed, too.
    """

    name: str
    options: dict[str, Any] | None
    limits: Limits = ()
    kind: str = "plain"
    unknown: str = ""

    @property
    def is_released(self) -> bool:
        return bool(self.options and self.options.get("release_gradients"))


def ways() -> list[HostWay]:
    """Return every row: fused in all ways to hold, AdamW's own code inside, released, and in a job of ranks."""
    found = []
    for weights in WEIGHTS:
        for dtype in STATE_FORMS if weights in ("stochastic", "split8") else (torch.float32,):
            name = f"fused, {weights}, {state_name(dtype)} state"
            limits = FP32_STATE if (weights, dtype) == ("stochastic", torch.float32) else FUSED
            found.append(HostWay(name, {"fused": True, "weights": weights, "state_dtype": dtype}, limits))
    found += [HostWay(f"own code, {weights}", {"fused": False, "weights": weights}, OWN) for weights in WEIGHTS]
    for dtype in (BF16, "8bit", "4bit"):
        name = f"own code, stochastic, {state_name(dtype)} state"
        found.append(HostWay(name, {"fused": False, "state_dtype": dtype}, OWN))
    for fused, limits in ((True, RELEASED_FUSED), (False, RELEASED)):
        for dtype in (torch.float32, "8bit"):
            name = f"released, {'fused' if fused else 'own code'}, {state_name(dtype)} state"
            options = {"fused": fused, "state_dtype": dtype, "release_gradients": True}
            found.append(HostWay(name, options, limits))
    for kind in ("DDP", "FSDP2"):
        found.append(HostWay(f"{kind}, fused", {"fused": True}, FP32_STATE[:2], kind))
        found.append(HostWay(f"{kind}, fused, 8-bit state", {"fused": True, "state_dtype": "8bit"}, FUSED, kind))
        found.append(HostWay(f"{kind}, own code", {"fused": False}, OWN, kind))
    for unknown, dtype in itertools.product(UNKNOWN, (torch.float32, BF16, "8bit")):
        limits = UNKNOWN_FP32 if dtype is torch.float32 else UNKNOWN_IN_COPIES
        name = f"unknown, {unknown}, {state_name(dtype)} state"
        found.append(HostWay(name, {"state_dtype": dtype}, limits, unknown=unknown))
    return found


def run(repeat: int, device: torch.device, tensors: Sequence[int] = TENSORS, only: str = "") -> measure.Bench:
    """Make a row for each way and each number of tensors.

    Args:
        device: a CPU is taken for a GPU.
        only: ways that have this in their names.
    """
    rows, notes = [], []
    with _silence():
        for count, way in itertools.product(tensors, ways()):
            if only not in way.name:
                continue
            is_here = device.type != "cpu" or bool(way.unknown)
            around: AbstractContextManager[dict[str, int]] = contextlib.nullcontext({}) if is_here else no_gpu()
            try:
                with around as told:
                    rows.append(_row(way, count, repeat, device, told))
                print(f"{rows[-1].name}: {rows[-1].figures['us']:.0f} us", file=sys.stderr, flush=True)
            except Exception as error:
                notes.append(f"{_name(way, count)}: {measure.in_a_line(error)}")
            gc.collect()
    there = "a CPU taken for a GPU: nothing is launched" if device.type == "cpu" else torch.cuda.get_device_name(device)
    return measure.Bench(f"the host's microseconds a step of AdamW, torch {torch.__version__}, {there}", rows, notes)


def exceeded(bench: measure.Bench) -> list[str]:
    """Return which rows exceed their limits, and which could not be measured."""
    limits = (
        measure.Limit(_name(way, count), column, at_most)
        for way in ways()
        for column, at_most, tensors in way.limits
        for count in tensors
    )
    return [*bench.notes, *measure.exceeded(bench, limits)]


def _name(way: HostWay, count: int) -> str:
    return f"{count} tensors, {way.name}"


def _row(way: HostWay, count: int, repeat: int, device: torch.device, told: dict[str, int]) -> measure.Line:
    """Step in turns with torch's own step of the same parameters in FP32."""
    turns = max(repeat, _STEPPED // count)
    with _job(device) if way.kind in ("DDP", "FSDP2") else contextlib.nullcontext():
        peer, own = Stepped(way._replace(options=None), count, device), Stepped(way, count, device)
        with own:
            first = own.step(0)
            for number in range(1, 4):
                peer.step(number)
                own.step(number)
            gc.collect()
            gc.disable()
            try:
                launched = told.get("launches", 0)
                times = [(peer.step(number), own.step(number)) for number in range(turns)]
                launched = told.get("launches", 0) - launched
            finally:
                gc.enable()
            theirs, least = (min(each) for each in zip(*times, strict=True))
            figures = {"us": 1e6 * least, "us/tensor": 1e6 * least / count}
            if not way.is_released:
                figures |= {"torch us": 1e6 * theirs, "ratio": least / theirs}
            figures["first ms"] = 1e3 * first
            if device.type == "cpu" and not way.unknown:
                figures["launches"] = launched / turns
            elif device.type != "cpu" and count == _PROFILED:
                figures |= _on_device(peer, own)
    return measure.Line(_name(way, count), figures)


def _on_device(peer: Stepped, own: Stepped) -> dict[str, float]:
    """Return the time of all kernels and copies of a step, and how many there are."""
    (theirs, _), (ours, launched) = (_profiled(each) for each in (peer, own))
    ratio = {} if own.way.is_released else {"device ratio": ours / theirs}
    return {"launches": launched, "device ms": 1e3 * ours, **ratio}


def _profiled(subject: Stepped) -> tuple[float, int]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        subject.step(0)
        torch.cuda.synchronize()
    events = [each for each in profiled.key_averages() if each.device_type == DeviceType.CUDA]
    events = [each for each in events if not each.is_user_annotation]
    return sum([each.self_device_time_total for each in events]) / 1e6, sum([each.count for each in events])


class Stepped:
    """An optimizer of the parameters of a GPT, stepped with other gradients each time, as in a training."""

    def __init__(self, way: HostWay, count: int, device: torch.device) -> None:
        self.way, self._device = way, device
        dtype = torch.float32 if way.options is None else BF16
        shapes = [(16, 16)] * count if way.unknown else gpt_of(count)
        made = [_made(shape, dtype, device) for shape in shapes]
        if way.kind == "FSDP2":
            made = _sharded(made, device)
        self.params = [nn.Parameter(each) for each in made]
        self._reducer = _replicated(self.params) if way.kind == "DDP" else None
        make = UNKNOWN[way.unknown] if way.unknown else _adamw
        self.optimizer = make(self.params)
        self._gradients = [_gradients(way.kind, self.params, device) for _ in range(2)] if not way.is_released else []
        self._beside = [nn.Parameter(_made(s, dtype, device)) for s in shapes] if way.is_released else []

    def __enter__(self) -> None:
        if self.way.options is not None:
            attach(self.optimizer, names=[str(i) for i in range(len(self.params))], **self.way.options)

    def __exit__(self, *_: object) -> None:
        self.optimizer.state.clear()  # nobody wants it in another dtype
        detach(self.optimizer)

    def step(self, number: int) -> float:
        """Return the seconds that a step takes the host."""
        if self.way.is_released:
            taken = _backward(self.params, self._device) - _backward(self._beside, self._device)
            for p in self._beside:
                p.grad = None
        else:
            taken = 0.0
            for p, gradient in zip(self.params, self._gradients[number % 2], strict=True):
                p.grad = gradient
        return taken + _seconds(self.optimizer.step, self._device)


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4, fused=True)


def gpt_of(count: int) -> list[Shape]:
    """Return the shapes of the first tensors of a GPT of 293 (406 M parameters); of a deeper, narrower one for more."""
    if count <= 293:
        return gpt()[:count]
    shapes = gpt(512, math.ceil((count - 5) / 12))
    return [*shapes[: count - 1], shapes[-1]]


def _made(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a weight or gradient; on a CPU no page of it is touched."""
    made = torch.empty(shape, dtype=dtype, device=device)
    return made if device.type == "cpu" else made.normal_(std=0.02)


def _gradients(kind: str, params: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return one for each parameter: as DDP's, those in one bucket lie one after the other."""
    if kind == "DDP":
        whole = _made((sum([p.numel() for p in params]),), params[0].dtype, device)
        return [each.view_as(p) for each, p in zip(whole.split([p.numel() for p in params]), params, strict=True)]
    if kind == "FSDP2":
        return _sharded([_made(tuple(p.shape), p.dtype, device) for p in params], device)
    return [_made(tuple(p.shape), p.dtype, device) for p in params]


def _sharded(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return them as `fully_shard` holds parameters: as DTensors, on a mesh of this rank alone."""
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh(device.type, (1,))
    return [DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for each in tensors]


def _replicated(params: list[nn.Parameter]) -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.ParameterList(params), init_sync=False, gradient_as_bucket_view=True)


@contextlib.contextmanager
def _job(device: torch.device) -> Iterator[None]:
    """Be the one rank of a job."""
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Gives(torch.autograd.Function):
    """Gives a parameter a gradient in a real backward pass, without computing it."""

    @staticmethod
    def forward(ctx: Any, p: torch.Tensor) -> torch.Tensor:
        ctx.like = p
        return torch.zeros((), device=p.device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.like)


def _backward(params: Sequence[torch.Tensor], device: torch.device) -> float:
    return _seconds(torch.stack([_Gives.apply(p) for p in params]).sum().backward, device)


def _seconds(work: Any, device: torch.device) -> float:
    """Return the seconds until `work` has returned; on a CPU, of this thread, as others share the machine."""
    clock = time.thread_time
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clock = time.perf_counter
    begin = clock()
    work()
    return clock() - begin


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop warnings about steps whose results nobody reads."""
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            torch.set_num_threads(threads)
