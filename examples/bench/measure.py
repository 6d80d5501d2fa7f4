"""Time and memory of several ways to do one thing, taken in turn so that they share the machine's noise."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from hmpx.base.files import write
from hmpx.insight.report import Field, table
from hmpx.ops.computing.kernels import capability
from hmpx.rounding import native
from hmpx.version import __version__

COUNTS = "launches", "us", "torch us"  # columns of whole numbers


@dataclass
class Line:
    """One line of a table: its figures, by column."""

    name: str
    figures: dict[str, float]


@dataclass
class Bench:
    """What was measured, in which surroundings, and what was not, and why."""

    title: str
    rows: list[Line]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def column(name: str) -> Field:
            def text(row: Line) -> str:
                return f"{row.figures[name]:.{_digits(name)}f}" if name in row.figures else ""

            return Field(f"{name:>12}", text, right=True)

        names = dict.fromkeys(name for row in self.rows for name in row.figures)
        fields = [Field("", lambda row: row.name), *map(column, names)]
        return "\n".join([self.title, *table(fields, self.rows, sys.maxsize), *self.notes])


class Limit(NamedTuple):
    """The largest figure that a row may have in a column. words: what it says, of a row that has to be there."""

    row: str
    column: str
    at_most: float
    words: str = ""


def exceeded(bench: Bench, limits: Iterable[Limit]) -> list[str]:
    """Return which figures are above their limits, or missing."""
    figures = {(row.name, column): value for row in bench.rows for column, value in row.figures.items()}
    found = []
    for row, column, at_most, words in limits:
        figure = figures.get((row, column))
        if figure is not None and figure > at_most:
            found.append(f"{words or f'{row}: {column}'} {figure:.2f}, at most {at_most:.2f}")
        elif figure is None and words:
            found.append(f"{words} not measured")
    return found


def save(benches: list[Bench], path: Path) -> None:
    """Write tables as JSON: one table, or a list of several."""
    tables = [{"hmpx": __version__, **asdict(bench)} for bench in benches]
    write(path, json.dumps(tables[0] if len(tables) == 1 else tables, indent=2) + "\n")


def _digits(column: str) -> int:
    if column in COUNTS:
        return 0
    return 3 if column.endswith("ms") else 2


Way = tuple[Callable[[], AbstractContextManager], Mapping[str, Callable[[], object]]]  # a context, works by name
_LOOKS = 10


def best_times(candidates: Mapping[str, Callable[[], object]], repeat: int, device: torch.device) -> dict[str, float]:
    """Return the least seconds of each candidate.

    For work of some milliseconds that is bound by memory: what other programs do at the same time is only ever added.
    """
    ways: dict[str, Way] = {name: (contextlib.nullcontext, {"": candidate}) for name, candidate in candidates.items()}
    return {name: taken[""] for name, taken in times_in(ways, repeat, device, min).items()}


def times_in(
    ways: Mapping[str, Way],
    repeat: int,
    device: torch.device,
    reduced: Callable[[list[float]], float] = statistics.median,
    calls: int = 0,
) -> dict[str, dict[str, float]]:
    """Return the seconds of each piece of work in each way, by way and work: their median over rounds.

    A way is a context and the works to be done in it. Every round goes through all ways, after two rounds that do not
    count; in each, a work is done once before it is measured, so that entering the context leaves no trace.

    Args:
        reduced: what to take over rounds in place of the median.
        calls: for work of a millisecond or less, how many calls in a row are timed. That is done ten times a round, and
            the least of these times counts, which other programs have disturbed least.
    """
    times: dict[str, dict[str, list[float]]] = {way: {name: [] for name in works} for way, (_, works) in ways.items()}
    for _ in range(repeat + 2):
        for way, (context, works) in ways.items():
            with context():
                for name, work in works.items():
                    work()
                    taken = times[way][name]
                    in_a_row = calls or 1
                    if taken and not calls:  # as often as takes 20 ms, which is well above the clock's own noise
                        in_a_row = max(1, min(100, round(0.02 / taken[-1])))
                    taken.append(min(seconds_of(work, in_a_row, device) for _ in range(_LOOKS if calls else 1)))
    return {way: {name: reduced(taken[2:]) for name, taken in works.items()} for way, works in times.items()}


def seconds_of(work: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the seconds of a call, of so many in a row."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return (time.perf_counter() - started) / calls


def where(device: torch.device) -> str:
    """Return the surroundings, for a title."""
    threads = torch.get_num_threads()
    if device.type != "cpu":
        return device.type
    built = native.architecture()
    imitated = "" if built == "native" else f", C kernels for {built}"
    return f"cpu ({capability()}{imitated}), {threads} thread{'s' if threads > 1 else ''}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the bytes of tensor memory that `work` takes at its peak, and the bytes that stay when it is done."""
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
    """Drop standard error, on which torch's profiler reports when it starts and stops."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def rows(times: dict[str, float], more: dict[str, dict[str, float]]) -> list[Line]:
    """Return one row a candidate; `ratio` is to the first candidate's time."""
    reference = next(iter(times.values()))
    return [
        Line(name, {"ms": 1e3 * seconds, "ratio": seconds / reference, **more[name]}) for name, seconds in times.items()
    ]


def in_a_line(error: Exception) -> str:
    """Return an error as a note has it."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
