"""``bench insight``: the cost of `hmpx.record` and `hmpx.compare`, beside a plain step that is converted."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from hmpx.bench import casts, measure
from hmpx.bench.train import Training, loss_of
from hmpx.insight.comparing.compare import compare
from hmpx.insight.recording.record import record
from hmpx.ops.policies.catalog import catalog

_BATCHES = 4, 12  # that compare runs through: the difference is what a batch takes, the rest what it takes to begin
_STEP = "step"


def run(repeat: int, device: torch.device, models: Sequence[str]) -> measure.Bench:
    """Measure a training step under autocast's lists in milliseconds, and `record` and `compare` in ratios to it.

    ``off``: after `record` has been used, as long as nothing records; ``changed`` counts the entry points of torch that
    run other code then than before, and is to be 0. ``record``: while it records. ``compare``: each batch of `compare`,
    also beside a step in FP32, which one of its two runs is; ``begin``: what a call
    takes besides. All calls have the same data; ``runs`` counts how often each batch is run.
    """
    rows = []
    for name in models:
        print(f"looking at {name}", file=sys.stderr)
        subject = Training(name, device)
        works = {_STEP: subject.works()[_STEP]}
        ways: dict[str, measure.Way] = {
            "hmpx": (lambda: casts.converted(device), works),
            "torch": (contextlib.nullcontext, works),
            "off": (lambda: _recorded_before(device), works),
            "record": (lambda: _recording(device), works),
        }
        times = {way: taken[_STEP] for way, taken in measure.times_in(ways, repeat, device).items()}
        begin, times["compare"], runs = _compared(subject, max(1, repeat // 5), device)
        figures = {"hmpx ms": 1e3 * times["hmpx"], "torch ms": 1e3 * times["torch"], "begin ms": 1e3 * begin}
        figures |= {f"{way}/hmpx": times[way] / times["hmpx"] for way in ("off", "record", "compare")}
        figures["compare/torch"] = times["compare"] / times["torch"]
        rows.append(measure.Line(name, figures | {"runs": runs, "changed": _changed(device)}))
    return measure.Bench(f"A step that is looked at, autocast's lists, {measure.where(device)}", rows)


@contextlib.contextmanager
def _recorded_before(device: torch.device) -> Iterator[None]:
    with casts.converted(device):
        with record():
            pass
        yield


@contextlib.contextmanager
def _recording(device: torch.device) -> Iterator[None]:
    with casts.converted(device), record():
        yield


def _compared(subject: Training, repeat: int, device: torch.device) -> tuple[float, float, float]:
    """Return seconds of a call of `compare` without batches, seconds for each batch, and runs of each batch."""
    few, many = _BATCHES
    torch.manual_seed(0)
    batches = [(torch.randn_like(subject.inputs), subject.targets) for _ in range(many)]

    def compared(number: int) -> int:
        return compare(subject.model, batches[:number], loss_of, progress=False).passes

    with casts.converted(device):
        calls: dict[str, Callable[[], object]] = {"few": lambda: compared(few), "many": lambda: compared(many)}
        times = measure.best_times(calls, repeat, device)
        runs = compared(many) / many
    batch = (times["many"] - times["few"]) / (many - few)
    return times["few"] - few * batch, batch, runs


def _changed(device: torch.device) -> int:
    """Count the entry points of torch that run other code after a record than before it."""
    with casts.converted(device):
        before = _codes()
        with record():
            pass
        return sum(code is not before[label] for label, code in _codes().items())


def _codes() -> dict[str, object]:
    functions = {
        entry.label: getattr(entry.owner, entry.attribute) for op in catalog().values() for entry in op.entries
    }
    return {label: getattr(function, "__code__", function) for label, function in functions.items()}
