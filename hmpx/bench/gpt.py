"""``bench gpu train``: a GPT trained in FP32, under `torch.autocast`, in BF16, and under each main recipe."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from hmpx.bench import measure
from hmpx.bench.models import Gpt
from hmpx.converting import restore
from hmpx.recipes.prepare import prepare

RECIPES = "autocast-cuda", "bf16-sr", "torchao-bf16-sr", "flash", "lean", "lean8", "lean4"
COMPILED = "autocast", "BF16", "autocast-cuda", "bf16-sr"
_WARM = 3  # steps that do not count: state is made, plans are made, blocks are compiled


class Size(NamedTuple):
    """Of a GPT and of its batch."""

    width: int = 1024
    layers: int = 24
    words: int = 50304
    length: int = 1024
    batch: int = 8


LARGE = Size()


def run(
    repeat: int,
    device: torch.device,
    size: Size = LARGE,
    recipes: Sequence[str] = RECIPES,
    compiled: Sequence[str] = COMPILED,
) -> measure.Bench:
    """Measure a training step with AdamW: milliseconds, tokens a second, GiB at the peak and after a step.

    ``ratio`` is to plain BF16, eager or compiled. Compiled are the blocks, each by itself, as they share what is made.
    A way that fails is a note.
    """
    rows, notes = [], []
    for mode, names in (("eager", ("FP32", "autocast", "BF16", *recipes)), ("compiled", compiled)):
        found: dict[str, dict[str, float]] = {}
        for name in names:
            try:
                found[name] = _figures(name, mode == "compiled", repeat, device, size)
                print(f"{mode}, {name}: {found[name]['ms']:.1f} ms", file=sys.stderr, flush=True)
            except Exception as error:
                notes.append(f"{mode}, {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        for name, figures in found.items():
            ratio = {"ratio": figures["ms"] / found["BF16"]["ms"]} if "BF16" in found else {}
            rows.append(measure.Line(f"{mode}, {name}", figures | ratio))
    with torch.device("meta"):
        count = sum([p.numel() for p in Gpt(*size[:4]).parameters()])
    title = f"Training a GPT, {count / 1e6:.1f} M parameters, {size.batch} x {size.length} tokens"
    return measure.Bench(f"{title}, {measure.where(device)}", rows, notes)


def _figures(name: str, compiled: bool, repeat: int, device: torch.device, size: Size) -> dict[str, float]:
    gc.collect()
    is_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if is_gpu else 0
    with _training(name, compiled, device, size) as step:
        for _ in range(_WARM):
            step()
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = min([_seconds(step, device) for _ in range(repeat)])
        figures = {"ms": 1e3 * seconds, "tokens/s": size.batch * size.length / seconds}
        if is_gpu:
            figures["peak GiB"] = (torch.cuda.max_memory_allocated(device) - before) / 2**30
            figures["held GiB"] = (torch.cuda.memory_allocated(device) - before) / 2**30
        return figures


@contextlib.contextmanager
def _training(name: str, compiled: bool, device: torch.device, size: Size) -> Iterator[Callable[[], object]]:
    """Yield what takes a step. `name`: a recipe, or a way of torch's own."""
    torch.manual_seed(0)
    with device:
        model = Gpt(*size[:4])
        batch = torch.randint(size.words, (size.batch, size.length + 1))
    around: Callable[[], AbstractContextManager] = contextlib.nullcontext
    if name == "BF16":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=3e-4, fused=True)
    try:
        if name == "autocast":
            around = lambda: torch.autocast(device.type, torch.bfloat16)  # noqa: E731
        elif name not in ("FP32", "BF16"):
            prepare(model, optimizer, name)
        if compiled:
            torch.compiler.reset()
            for block in model.blocks:
                block.compile()

        def step() -> None:
            with around():
                loss = model(batch[:, :-1], batch[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield step
    finally:
        optimizer.state.clear()
        restore(optimizer)


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
