"""``bench gpu``: the tests and every table on a GPU, in at most six minutes, and a page to send.

Each part is a process of its own with a limit of seconds: what fails or hangs there stops no other part. What is
expected of a GPU follows from the bytes that are moved: rounding and steps are bound by memory.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from bench import gpt, host, updates
from bench.measure import Bench, Limit, Line, exceeded
from hmpx.base.files import write
from hmpx.errors import HmpxError
from hmpx.version import __version__

_ROOT = Path(__file__).parents[2]
_BESIDE = "triton", "torchao", "torch-optimi", "bitsandbytes"
_FORMS = ("toy", "resnet50", "bert-base", "gpt2-small")
Say = Callable[[str], object]


class Part(NamedTuple):
    """One table. It is made from the number of timed rounds and the device, in at most so many seconds."""

    seconds: int
    make: Callable[[int, torch.device], Bench]


# What was expected before anybody had measured it, by part.
EXPECTED: dict[str, list[Limit]] = {
    "rounding": [Limit("hmpx Triton kernel", "ratio", 1 / 0.85, "stochastic rounding / torch's copy_, same bytes:")],
    "step": [Limit("hmpx fused, BF16 states", "ratio", 0.9, "fused AdamW with BF16 state / torch's fused FP32 step:")],
    "train": [Limit("eager, lean8", "ratio", 1.15, "a training step of lean8 / one of plain BF16:")],
    "fp8": [
        Limit("4096 wide, 4 blocks eager, hmpx tensorwise", "ratio", 1 / 1.1, "eager tensorwise FP8 / BF16:"),
        Limit("1024 wide, 4 blocks eager, hmpx tensorwise", "ratio", 1.0, "the same, 1024 wide:"),
    ],
}


def tests(repeat: int, device: torch.device) -> Bench:
    """Run the tests with the marker ``cuda``: one row, and a note for each that fails."""
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "-rfE", "tests/test_cuda.py"]
    command += ["-n", "4"] if importlib.util.find_spec("xdist") else []
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    said = (done.stdout + done.stderr).splitlines()
    counts = re.findall(r"(\d+) (passed|failed|errors?)", (said or [""])[-1])
    notes = [line for line in said if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not notes:
        notes = [f"pytest ended with status {done.returncode}: {(said or [''])[-1]}"]
    figures = {what: float(number) for number, what in counts}
    return Bench("tests with the marker cuda", [Line("tests/test_cuda.py", figures)], notes)


PARTS = {
    "tests": Part(100, tests),
    "rounding": Part(30, lambda repeat, device: updates.rounding(1 << 27, repeat, device)),
    "step": Part(50, lambda repeat, device: updates.step(1 << 27, repeat, device, peers=False)),
    "models": Part(30, lambda repeat, device: updates.steps_of_models(_FORMS, repeat, device)),
    "host": Part(70, lambda repeat, device: host.run(repeat, device)),
    "train": Part(80, lambda repeat, device: gpt.run(repeat, device)),
}
ALONE = PARTS | {"fp8": Part(300, lambda repeat, device: gpt.run_fp8(repeat, device))}  # run where it is asked for


def run(parts: Sequence[str], folder: Path, repeat: int, say: Say) -> list[str]:
    """Run these parts, write ``hmpx-gpu.json`` and ``hmpx-gpu.md`` into the folder, and return what fell short.

    Raises:
        HmpxError: torch sees no GPU.
    """
    gpu()
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as private:
        for part in parts:
            say(f"## {part}, at most {ALONE[part].seconds} s")
            file = Path(private, "part.json")
            found[part] = apart(part, [*_COMMAND, part, "--repeat", str(repeat), "--json", str(file)], file)
    return report(folder, surroundings(), found)


_COMMAND = sys.executable, str(Path(__file__).parent), "gpu"


def apart(part: str, command: Sequence[str], file: Path) -> dict:
    """Run one part in a process that prints as it goes; return what it has written, or that it has written nothing."""
    file.unlink(missing_ok=True)
    seconds = ALONE[part].seconds
    try:
        status = subprocess.run(command, cwd=_ROOT, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        return {"short": [f"bench gpu {part}: stopped after {seconds} s"]}
    if not file.exists():
        return {"short": [f"bench gpu {part}: ended with status {status}"]}
    return json.loads(file.read_text(encoding="utf-8"))


def run_one(part: str, repeat: int, file: Path | None, say: Say) -> list[str]:
    """Run one part in this process, say its table, and return what fell short.

    Raises:
        HmpxError: torch sees no GPU.
    """
    bench = ALONE[part].make(repeat, gpu())
    short = short_of(part, bench)
    say(str(bench))
    if file is not None:
        write(file, json.dumps({"table": asdict(bench), "short": short}, indent=2) + "\n")
    return short


def short_of(part: str, bench: Bench) -> list[str]:
    """Return which figures of a part are not as expected."""
    if part == "host":
        return host.exceeded(bench)
    return [*(bench.notes if part in ("tests", "train") else []), *exceeded(bench, EXPECTED.get(part, ()))]


def gpu() -> torch.device:
    """Return the GPU.

    Raises:
        HmpxError: torch sees none.
    """
    if not torch.cuda.is_available():
        raise HmpxError(f"gpu wants a GPU, and torch {torch.__version__} sees none: run it where it does")
    return torch.device("cuda")


def report(folder: Path, about: Mapping[str, str], found: Mapping[str, dict]) -> list[str]:
    """Write both files; return what fell short in all parts."""
    short = [each for part in found.values() for each in part["short"]]
    tables = {part: told["table"] for part, told in found.items() if "table" in told}
    whole = {"hmpx": __version__, "about": about, "short": short, "tables": tables}
    write(folder / "hmpx-gpu.json", json.dumps(whole, indent=2) + "\n")
    write(folder / "hmpx-gpu.md", "\n".join([*_page(about, short, tables), ""]))
    return short


def _page(about: Mapping[str, str], short: list[str], tables: Mapping[str, dict]) -> Iterable[str]:
    yield from (f"# hmpx on {about['GPU']}", "", *(f"- {key}: {value}" for key, value in about.items()))
    yield from ("", "## What fell short", "", *([f"- {each}" for each in short] or ["Nothing."]))
    for part, table in tables.items():
        bench = Bench(table["title"], [Line(**row) for row in table["rows"]], table["notes"])
        yield from ("", f"## {part}", "", "```text", str(bench), "```")


def surroundings() -> dict[str, str]:
    """Return what the GPU is, and what is installed."""
    found = torch.cuda.get_device_properties(0)
    about = {
        "GPU": f"{found.name}, {found.total_memory / 2**30:.0f} GiB, of {torch.cuda.device_count()}",
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
