"""Time and memory of several ways to do one thing, taken in turn so that they share the machine's noise."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Row:
    """One candidate: its figures, by column. `ratio` is to the first row's median time."""

    name: str
    milliseconds: float
    ratio: float
    more: dict[str, float] = field(default_factory=dict)


def median_times(candidates: dict[str, Callable[[], object]], repeat: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each candidate; every round calls each of them once, after two rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(repeat + 2):
        for name, candidate in candidates.items():
            _wait(device)
            started = time.perf_counter()
            candidate()
            _wait(device)
            if turn >= 2:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Bytes of tensor memory that `work` takes at its peak, and that stay when it is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak, now


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without standard error, on which torch's profiler reports when it starts and stops."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def rows(times: dict[str, float], more: dict[str, dict[str, float]] | None = None) -> list[Row]:
    """The measured times as rows; the first is the reference of the ratios."""
    reference = next(iter(times.values()))
    return [Row(name, 1e3 * t, t / reference, (more or {}).get(name, {})) for name, t in times.items()]


def table(title: str, measured: list[Row]) -> str:
    """The rows as text."""
    columns = list(dict.fromkeys(column for row in measured for column in row.more))
    width = max(len(row.name) for row in measured)
    head = f"{'':{width}}  {'ms':>9}  {'ratio':>6}" + "".join(f"  {column:>12}" for column in columns)
    lines = [title, head]
    for row in measured:
        figures = "".join(f"  {row.more[c]:12.2f}" if c in row.more else f"  {'':12}" for c in columns)
        lines.append(f"{row.name:{width}}  {row.milliseconds:9.3f}  {row.ratio:6.2f}{figures}")
    return "\n".join(lines)


def save(path: Path, title: str, measured: list[Row]) -> None:
    """The rows as JSON."""
    path.write_text(json.dumps({"title": title, "rows": [asdict(row) for row in measured]}, indent=2) + "\n")
