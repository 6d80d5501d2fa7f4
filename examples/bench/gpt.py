"""``bench gpu train`` and ``bench gpu fp8``: a GPT trained in every precision, and its blocks in FP8 beside torchao."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn

from bench import measure
from bench.models import Block, Gpt
from hmpx.conversion import convert, restore
from hmpx.recipes.prepare import prepare

RECIPES = "autocast-cuda", "bf16-sr", "torchao-bf16-sr", "flash", "lean", "lean8", "lean4"
COMPILED = "autocast", "BF16", "autocast-cuda", "bf16-sr"
_WARM = 3  # steps that do not count: state is made, plans are made, blocks are compiled
_HEAD = 64  # the width of an attention head


def _add_rows(bench: measure.Bench, what: str, ways: Mapping[str, Callable[[], dict[str, float]]]) -> None:
    """Add a row for each way, one measured after the other; `ratio` is to BF16. A way that fails is a note."""
    found: dict[str, dict[str, float]] = {}
    for name, figures_of in ways.items():
        try:
            found[name] = figures_of()
            print(f"{what}, {name}: {found[name]['ms']:.2f} ms", file=sys.stderr, flush=True)
        except Exception as error:
            bench.notes.append(f"{what}, {name}: {measure.in_a_line(error)}")
    for name, figures in found.items():
        ratio = {"ratio": figures["ms"] / found["BF16"]["ms"]} if "BF16" in found else {}
        bench.rows.append(measure.Line(f"{what}, {name}", figures | ratio))


# A training


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

    Compiled are the blocks, each by itself, as they share what is made.
    """
    with torch.device("meta"):
        count = sum([p.numel() for p in Gpt(*size[:4]).parameters()])
    title = f"Training a GPT, {count / 1e6:.1f} M parameters, {size.batch} x {size.length} tokens"
    bench = measure.Bench(f"{title}, {measure.where(device)}", [])
    for mode, names in (("eager", ("FP32", "autocast", "BF16", *recipes)), ("compiled", compiled)):
        rest = mode == "compiled", repeat, device, size
        _add_rows(bench, mode, {name: functools.partial(_figures, name, *rest) for name in names})
    return bench


def _figures(name: str, compiled: bool, repeat: int, device: torch.device, size: Size) -> dict[str, float]:
    gc.collect()
    is_gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if is_gpu else 0
    with _training(name, compiled, device, size) as step:
        for _ in range(_WARM):
            step()
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        seconds = min([measure.seconds_of(step, 1, device) for _ in range(repeat)])
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


# Blocks in FP8

Way = tuple[Callable[[], AbstractContextManager], Callable[[nn.Module], nn.Module]]


def fp8_ways() -> dict[str, Way]:
    """Return the context of each way, and what it makes of a model."""
    found: dict[str, Way] = {"BF16": (contextlib.nullcontext, lambda model: model)}
    for form in ("tensorwise", "rowwise"):
        converted = functools.partial(convert, bf16=[], fp32=[], promote=[], fp8=["linear"], fp8_format=form)
        found[f"hmpx {form}"] = converted, lambda model: model
    with contextlib.suppress(ImportError):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for form in ("tensorwise", "rowwise"):
            config = Float8LinearConfig.from_recipe_name(form)
            theirs = functools.partial(convert_to_float8_training, config=config)
            found[f"torchao {form}"] = contextlib.nullcontext, theirs
    return found


def run_fp8(
    repeat: int, device: torch.device, widths: Sequence[int] = (1024, 4096), tokens: int = 8192, blocks: int = 4
) -> measure.Bench:
    """Measure milliseconds of eager blocks, of each width, and of one compiled block.

    One way after the other: to convert is to compile anew.
    """
    notes = [] if len(fp8_ways()) > 3 else ["torchao is not installed"]
    bench = measure.Bench(f"FP8, {tokens} tokens, forward and backward, {measure.where(device)}", [], notes)
    length = min(tokens, 1024)

    def figures(way: Way, x: torch.Tensor, count: int, compiled: bool) -> dict[str, float]:
        torch.manual_seed(0)
        width, (context, made) = x.shape[-1], way
        model = nn.Sequential(*(Block(width, width // _HEAD) for _ in range(count))).to(x)
        with context():
            torch.compiler.reset()
            work = _work(torch.compile(made(model)) if compiled else made(model), x)
            return {"ms": 1e3 * measure.best_times({"": work}, repeat, device)[""]}

    for width in widths:
        x = torch.randn(tokens // length, length, width, device=device, dtype=torch.bfloat16)
        for count, compiled in ((blocks, False), (1, True)):
            what = f"{width} wide, {'one block compiled' if compiled else f'{count} blocks eager'}"
            ways = {name: functools.partial(figures, way, x, count, compiled) for name, way in fp8_ways().items()}
            _add_rows(bench, what, ways)
    return bench


def _work(model: Callable, x: torch.Tensor) -> Callable[[], None]:
    inputs = x.clone().requires_grad_()

    def work() -> None:
        made = model(inputs)
        torch.autograd.backward([made], [x])
        inputs.grad = None

    return work
