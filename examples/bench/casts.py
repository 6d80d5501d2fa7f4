"""``bench casts`` and ``bench train``: one call of an op, and whole models, beside torch and `torch.autocast`.

The lists are those of autocast for the device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import measure
from bench.models import MODELS
from hmpx.conversion import convert
from hmpx.errors import HmpxError
from hmpx.insight.recording.record import record
from hmpx.ops.policies.lists import shipped
from hmpx.regions import cached_weights, disable_casts

_CALLS = 100  # of each op in a row
_SIDE, _BATCH = 512, 8  # of a layer whose weight is cast once


def autocast(device: torch.device, cache: bool = True) -> AbstractContextManager:
    """Return torch.autocast to BF16, with its cache of weights within one forward or without it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)


def converted(device: torch.device) -> AbstractContextManager:
    """Convert torch with the lists that autocast has for the device."""
    folder = shipped() / f"autocast-{device.type}"
    if not folder.is_dir():
        raise HmpxError(f"device {device.type!r}: autocast's lists are there for cpu and cuda")
    bf16, fp32, promote = (folder / f"{side}.txt" for side in ("bf16", "fp32", "promote"))
    return convert(bf16_file_path=bf16, fp32_file_path=fp32, promote_file_path=promote)


@contextlib.contextmanager
def cached(device: torch.device) -> Iterator[None]:
    """Convert torch, and open `cached_weights()`."""
    with converted(device), cached_weights():
        yield


def run(repeat: int, device: torch.device) -> measure.Bench:
    """Measure microseconds a call on 8 x 8 tensors, where only the surroundings of an op cost. Weights need gradients.

    Autocast runs without its cache of weights, which within one long context would cast each weight once for all calls.
    """
    calls = _ops(device)
    ways: dict[str, measure.Way] = {
        "torch": (contextlib.nullcontext, calls),
        "autocast": (lambda: autocast(device, cache=False), calls),
        "hmpx": (lambda: converted(device), calls),
    }
    times = measure.times_in(ways, repeat, device, min, _CALLS)
    rows = []
    for name in calls:
        micro = {way: 1e6 * taken[name] for way, taken in times.items()}
        figures = {f"{way} us": value for way, value in micro.items()}
        ratios = {f"hmpx/{peer}": micro["hmpx"] / micro[peer] for peer in ("autocast", "torch")}
        rows.append(measure.Line(name, figures | ratios))
    return measure.Bench(f"One call on 8 x 8 tensors, autocast's lists, {measure.where(device)}", rows)


def run_kept(repeat: int, device: torch.device) -> measure.Bench:
    """Measure microseconds of a linear layer without gradients whose weight and bias are cast already."""
    layer = nn.Linear(_SIDE, _SIDE, device=device)
    low = nn.Linear(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    x = torch.randn(_BATCH, _SIDE, device=device)
    x16 = x.bfloat16()

    ways: dict[str, measure.Way] = {
        "torch, FP32": (contextlib.nullcontext, {"": lambda: layer(x)}),
        "torch, BF16 model": (contextlib.nullcontext, {"": lambda: low(x16)}),
        "autocast, the weight in its cache": (lambda: autocast(device), {"": lambda: layer(x)}),
        "hmpx": (lambda: converted(device), {"": lambda: layer(x)}),
        "hmpx, in cached_weights()": (lambda: cached(device), {"": lambda: layer(x)}),
    }
    with torch.no_grad():
        times = measure.times_in(ways, repeat, device, min, _CALLS // 10)
    rows = [measure.Line(way, {"us": 1e6 * taken[""]}) for way, taken in times.items()]
    return measure.Bench(f"A linear layer, {_BATCH} x {_SIDE} to {_SIDE}, {measure.where(device)}", rows)


def _ops(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return calls by name, and a step in which nothing is to be rounded.

    On CPU linear, matmul and conv2d are in the bf16 list, mse_loss in fp32, others in none.
    """

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(8, 8, device=device, dtype=dtype)
        return x, nn.Parameter(torch.randn_like(x)), nn.Parameter(torch.zeros(8, device=device, dtype=dtype))

    x, weight, bias = make(torch.float32)
    x16, weight16, bias16 = make(torch.bfloat16)
    image, kernel = torch.randn(1, 1, 8, 8, device=device), nn.Parameter(torch.randn(1, 1, 3, 3, device=device))
    stepped = [make(torch.float32)[1] for _ in range(6)]
    for p in stepped:
        p.grad = torch.zeros_like(p)
    return {
        "SGD.step, six FP32 tensors": torch.optim.SGD(stepped).step,
        "linear, BF16 comes": lambda: F.linear(x16, weight16, bias16),
        "linear, FP32 comes": lambda: F.linear(x, weight, bias),
        "matmul, BF16 comes": lambda: torch.matmul(x16, weight16),
        "matmul, FP32 comes": lambda: torch.matmul(x, weight),
        "x @ y, BF16 comes": lambda: x16 @ weight16,
        "x @ y, FP32 comes": lambda: x @ weight,
        "conv2d, FP32 comes": lambda: F.conv2d(image, kernel),
        "mse_loss, FP32 comes": lambda: F.mse_loss(x, weight),
        "mse_loss, BF16 comes": lambda: F.mse_loss(x16, weight16),
        "layer_norm, FP32 comes": lambda: F.layer_norm(x, (8,), bias, bias),
        "softmax, in no list": lambda: F.softmax(x16, -1),
        "gelu, in no list": lambda: F.gelu(x16),
        "x + y, in no list": lambda: x16 + weight16,
    }


# Whole models, eager and compiled

_STEP = "step"
_ACCUMULATED = 4  # forward and backward passes of one step
_CACHED, _RECORDED = "hmpx cached", "hmpx record"
Work = Callable[[], object]


def run_models(repeat: int, device: torch.device, models: Sequence[str], compiled: bool) -> measure.Bench:
    """Measure milliseconds of a training step (FP32 weights, AdamW), of one with four batches, of an inference.

    ``hmpx cached``: inference inside `cached_weights()`. ``hmpx record``: a step that `hmpx.record` looks at.
    """
    rows = []
    for model in models:
        rows += _eager(model, repeat, device)
        if compiled:
            rows += _compiled(model, repeat, device)
    return measure.Bench(f"Whole models, autocast's lists, {measure.where(device)}", rows)


def _eager(model: str, repeat: int, device: torch.device) -> list[measure.Line]:
    subject = Training(model, device)
    # A forward enters autocast, as it does in users' code; a conversion stands around everything.
    ways: dict[str, measure.Way] = {
        "torch": (contextlib.nullcontext, subject.works()),
        "autocast": (contextlib.nullcontext, subject.works(functools.partial(autocast, device))),
        "hmpx": (functools.partial(converted, device), subject.works()),
        _CACHED: (functools.partial(cached, device), subject.inferences()),
        _RECORDED: (functools.partial(_recorded, device), {_STEP: subject.works()[_STEP]}),
    }
    return _rows(f"{model}, eager", measure.times_in(ways, repeat, device))


def _compiled(model: str, repeat: int, device: torch.device) -> list[measure.Line]:
    """Measure under one conversion: to convert is to compile anew. Plain torch and autocast run with casts disabled."""
    print(f"compiling {model}", file=sys.stderr)
    subject = Training(model, device, compiled=True)
    with converted(device):
        ways: dict[str, measure.Way] = {
            "torch": (disable_casts, subject.works()),
            "autocast": (disable_casts, subject.works(functools.partial(autocast, device))),
            "hmpx": (contextlib.nullcontext, subject.works()),
        }
        return _rows(f"{model}, compiled", measure.times_in(ways, repeat, device))


@contextlib.contextmanager
def _recorded(device: torch.device) -> Iterator[None]:
    with converted(device), record():
        yield


def loss_of(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets)


class Training:
    """One model, its optimizer and a batch, for all ways: where tensors lie in memory makes a difference."""

    def __init__(self, model: str, device: torch.device, compiled: bool = False) -> None:
        torch.manual_seed(0)
        self._compile: Callable = torch.compile if compiled else lambda function: function
        made, inputs = MODELS[model]()
        self.model, self.inputs = made.to(device), inputs.to(device)
        self.targets = torch.randint(10, (len(self.inputs),), device=device)
        self._frozen = copy.deepcopy(self.model).eval()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def works(self, forward: Callable = contextlib.nullcontext) -> dict[str, Work]:
        """Return what is measured, by name. `forward()` is entered around every forward."""
        loss = self._compile(loss_of)  # once a way, so that none has the guards of another

        def step(batches: int) -> None:
            for _ in range(batches):
                with forward():
                    found = loss(self.model, self.inputs, self.targets)
                found.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

        steps = {_STEP: lambda: step(1), f"step of {_ACCUMULATED} batches": lambda: step(_ACCUMULATED)}
        return steps | self.inferences(forward)

    def inferences(self, forward: Callable = contextlib.nullcontext) -> dict[str, Work]:
        frozen = self._compile(self._frozen)

        def inference(inputs: Tensor) -> None:
            with torch.no_grad(), forward():
                frozen(inputs)

        return {
            "inference": lambda: inference(self.inputs),
            "inference of one": lambda: inference(self.inputs[:1]),
        }


def _rows(title: str, times: dict[str, dict[str, float]]) -> list[measure.Line]:
    rows = []
    for work in times["torch"]:
        taken = {way: works[work] for way, works in times.items() if work in works}
        figures = {f"{way} ms": 1e3 * seconds for way, seconds in taken.items()}
        ratios = {f"{way}/autocast": taken[way] / taken["autocast"] for way in ("hmpx", _CACHED) if way in taken}
        ratios["hmpx/torch"] = taken["hmpx"] / taken["torch"]
        if _RECORDED in taken:
            ratios[f"{_RECORDED}/hmpx"] = taken[_RECORDED] / taken["hmpx"]
        rows.append(measure.Line(f"{title}, {work}", figures | ratios))
    return rows
