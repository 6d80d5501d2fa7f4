"""``bench gpu``: every table on a GPU, in one command that writes a JSON and a page to send.

What is expected of a GPU follows from counts (`bench launches`) and bytes: rounding and steps are bound by memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from hmpx.bench import casts, fp8, launches, train, updates
from hmpx.bench.measure import Bench
from hmpx.errors import HmpxError
from hmpx.version import __version__

_ROOT = Path(__file__).parents[2]
_BESIDE = "triton", "torchao", "torch-optimi", "bitsandbytes"
Tables = Mapping[str, Callable[[], Bench]]


class Expected(NamedTuple):
    """A figure of a table that was expected before anybody had measured it.

    at_most: the largest figure that is as expected.
    """

    table: str
    row: str
    column: str
    at_most: float
    words: str

    def missed(self, tables: Mapping[str, Bench]) -> str:
        """Return how the figure falls short; an empty string if it does not."""
        rows = tables[self.table].rows if self.table in tables else []
        found = next((row.figures.get(self.column) for row in rows if row.name == self.row), None)
        if found is None:
            return f"{self.words}: not measured"
        return f"{self.words}: {found:.2f}, expected at most {self.at_most:.2f}" if found > self.at_most else ""


EXPECTED = (
    Expected("rounding", "hmpx Triton kernel", "ratio", 1 / 0.85, "stochastic rounding / torch's copy_, same bytes"),
    Expected("step", "hmpx fused, BF16 states", "ratio", 0.9, "fused AdamW with BF16 state / torch's fused FP32 step"),
)
EXPECTED_OF_FP8 = (
    Expected("fp8", "4096 wide, 4 blocks eager, hmpx tensorwise", "ratio", 1 / 1.1, "eager tensorwise FP8 / BF16"),
    Expected("fp8", "1024 wide, 4 blocks eager, hmpx tensorwise", "ratio", 1.0, "the same, 1024 wide"),
)


def tables_on(device: torch.device, repeat: int) -> Tables:
    """Return what makes each table, by its name; each takes one to three minutes."""
    return {
        "rounding": lambda: updates.rounding(1 << 27, repeat, device),
        "step": lambda: updates.step(1 << 28, repeat, device),
        "step, models": lambda: updates.steps_of_models(("toy", "resnet50", "bert-base", "gpt2-small"), repeat, device),
        "casts": lambda: casts.run(repeat, device),
        "train": lambda: train.run(repeat, device, ("mlp", "convnet", "transformer"), False),
        "launches": lambda: launches.run([537e6]),
    }


def run(folder: Path, repeat: int, say: Callable[[str], object]) -> list[str]:
    """Measure all, write ``hmpx-gpu.json`` and ``hmpx-gpu.md`` into the folder, and return what fell short.

    Raises:
        HmpxError: torch sees no GPU.
    """
    device = _gpu()
    return report(folder, surroundings(), tables_on(device, repeat), tests(), say)


def run_fp8(repeat: int, say: Callable[[str], object]) -> list[str]:
    """Measure FP8 alone, and return what fell short.

    Raises:
        HmpxError: torch sees no GPU.
    """
    tables = {"fp8": fp8.run(repeat, _gpu())}
    say(str(tables["fp8"]))
    return [*filter(None, [each.missed(tables) for each in EXPECTED_OF_FP8])]


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise HmpxError(f"bench gpu wants a GPU, and torch {torch.__version__} sees none: run it where it does")
    return torch.device("cuda")


def report(
    folder: Path, about: Mapping[str, str], tables: Tables, said_by_tests: str, say: Callable[[str], object]
) -> list[str]:
    """Measure these tables, and write both files; a table that raises is noted, and the rest are measured."""
    found: dict[str, Bench] = {}
    short = [] if said_by_tests.startswith("passed") else [f"tests with the marker cuda: {said_by_tests}"]
    for name, table in tables.items():
        try:
            found[name] = table()
            say(f"{found[name]}\n")
        except Exception as error:
            short.append(f"bench {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
    short += filter(None, [each.missed(found) for each in EXPECTED])
    whole = {
        "hmpx": __version__,
        "about": about,
        "tests": said_by_tests,
        "short": short,
        "tables": {k: asdict(v) for k, v in found.items()},
    }
    (folder / "hmpx-gpu.json").write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    (folder / "hmpx-gpu.md").write_text(page(about, said_by_tests, short, found), encoding="utf-8")
    return short


def page(about: Mapping[str, str], said_by_tests: str, short: list[str], found: Mapping[str, Bench]) -> str:
    """Return the report in Markdown."""
    lines = [f"# hmpx on {about['GPU']}", "", *(f"- {key}: {value}" for key, value in about.items())]
    lines += [f"- tests: {said_by_tests}", "", "## What fell short", ""]
    lines += [f"- {each}" for each in short] or ["Nothing."]
    for name, bench in found.items():
        lines += ["", f"## {name}", "", "```text", str(bench), "```"]
    return "\n".join([*lines, ""])


def surroundings() -> dict[str, str]:
    """Return what the GPU is, and what is installed."""
    gpu = torch.cuda.get_device_properties(0)
    about = {
        "GPU": f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, of {torch.cuda.device_count()}",
        "hmpx": __version__,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}",
        "Python": platform.python_version(),
    }
    for package in _BESIDE:
        try:
            about[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            about[package] = "not installed"
    return about


def tests() -> str:
    """Run the tests with the marker ``cuda``: "passed", or what they said last."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "tests/test_cuda.py"]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    last = said[-1] if said else ""
    return f"passed ({last})" if done.returncode == 0 else f"exit status {done.returncode}: {last}"
