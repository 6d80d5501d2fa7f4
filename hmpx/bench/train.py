"""``bench train``: whole models, eager and compiled, beside plain torch and `torch.autocast` with the same lists."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hmpx.bench import casts, measure
from hmpx.bench.models import MODELS
from hmpx.insight.recording.record import record
from hmpx.regions import cached_weights, disable_casts

_STEP = "step"
_ACCUMULATED = 4  # forward and backward passes of one step
_CACHED, _RECORDED = "hmpx cached", "hmpx record"
Work = Callable[[], object]


def run(repeat: int, device: torch.device, models: Sequence[str], compiled: bool) -> measure.Bench:
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
        "autocast": (contextlib.nullcontext, subject.works(functools.partial(casts.autocast, device))),
        "hmpx": (functools.partial(casts.converted, device), subject.works()),
        _CACHED: (functools.partial(_cached, device), subject.inferences()),
        _RECORDED: (functools.partial(_recorded, device), {_STEP: subject.works()[_STEP]}),
    }
    return _rows(f"{model}, eager", measure.times_in(ways, repeat, device))


def _compiled(model: str, repeat: int, device: torch.device) -> list[measure.Line]:
    """Measure under one conversion: to convert is to compile anew. Plain torch and autocast run with casts disabled."""
    print(f"compiling {model}", file=sys.stderr)
    subject = Training(model, device, compiled=True)
    with casts.converted(device):
        ways: dict[str, measure.Way] = {
            "torch": (disable_casts, subject.works()),
            "autocast": (disable_casts, subject.works(functools.partial(casts.autocast, device))),
            "hmpx": (contextlib.nullcontext, subject.works()),
        }
        return _rows(f"{model}, compiled", measure.times_in(ways, repeat, device))


@contextlib.contextmanager
def _cached(device: torch.device) -> Iterator[None]:
    with casts.converted(device), cached_weights():
        yield


@contextlib.contextmanager
def _recorded(device: torch.device) -> Iterator[None]:
    with casts.converted(device), record():
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
