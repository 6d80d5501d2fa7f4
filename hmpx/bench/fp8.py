"""``bench gpu fp8``: blocks of a GPT in BF16 and in FP8, forward and backward, beside torchao."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from hmpx.bench import measure
from hmpx.bench.models import Block
from hmpx.converting import convert

_HEAD = 64  # the width of an attention head
Way = tuple[Callable[[], AbstractContextManager], Callable[[nn.Module], nn.Module]]


def ways() -> dict[str, Way]:
    """Return the context of each way, and what it makes of a model."""
    found: dict[str, Way] = {"BF16": (contextlib.nullcontext, lambda model: model)}
    for form in ("tensorwise", "rowwise"):
        found[f"hmpx {form}"] = functools.partial(_in_fp8, form), lambda model: model
    with contextlib.suppress(ImportError):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        for form in ("tensorwise", "rowwise"):
            config = Float8LinearConfig.from_recipe_name(form)
            theirs = functools.partial(convert_to_float8_training, config=config)
            found[f"torchao {form}"] = contextlib.nullcontext, theirs
    return found


@contextlib.contextmanager
def _in_fp8(form: str) -> Iterator[None]:
    with convert(bf16=[], fp32=[], promote=[], fp8=["linear"], fp8_format=form):
        yield


def run(
    repeat: int, device: torch.device, widths: Sequence[int] = (1024, 4096), tokens: int = 8192, blocks: int = 4
) -> measure.Bench:
    """Measure milliseconds of eager blocks, of each width, and of one compiled block; `ratio` is to BF16.

    One way after the other: to convert is to compile anew. A way that fails is a note.
    """
    rows, notes = [], [] if len(ways()) > 3 else ["torchao is not installed"]
    length = min(tokens, 1024)
    for width in widths:
        x = torch.randn(tokens // length, length, width, device=device, dtype=torch.bfloat16)
        for count, compiled in ((blocks, False), (1, True)):
            what = f"{width} wide, {'one block compiled' if compiled else f'{count} blocks eager'}"
            times: dict[str, float] = {}
            for name, (context, made) in ways().items():
                torch.manual_seed(0)
                model = nn.Sequential(*(Block(width, width // _HEAD) for _ in range(count))).to(x)
                try:
                    with context():
                        torch.compiler.reset()
                        work = _work(torch.compile(made(model)) if compiled else made(model), x)
                        times[name] = measure.best_times({name: work}, repeat, device)[name]
                    print(f"{what}, {name}: {1e3 * times[name]:.2f} ms", file=sys.stderr, flush=True)
                except Exception as error:
                    notes.append(f"{what}, {name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            for name, seconds in times.items():
                figures = {"ms": 1e3 * seconds} | ({"ratio": seconds / times["BF16"]} if "BF16" in times else {})
                rows.append(measure.Line(f"{what}, {name}", figures))
    return measure.Bench(f"FP8, {tokens} tokens, forward and backward, {measure.where(device)}", rows, notes)


def _work(model: Callable, x: torch.Tensor) -> Callable[[], None]:
    inputs = x.clone().requires_grad_()

    def work() -> None:
        made = model(inputs)
        torch.autograd.backward([made], [x])
        inputs.grad = None

    return work
