"""Train a small character transformer four ways and see what the rounding of its weight updates does.

The text is English that ships with Python: the help topics of `pydoc`. Every way starts from the same weights and sees
the same batches; the last two differ in one line. ``python examples/charlm.py`` takes about 20 seconds; ``--full``
trains for nine times as many steps, on batches twice as large.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from torch import Tensor, nn

import hmpx

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CharTransformer(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text) + self.positions(torch.arange(text.shape[1]))
        return self.head(self.norm(self.blocks(x)))


@dataclass
class Run:
    """One way to train, and what came of it."""

    name: str
    color: str
    bf16_weights: bool = False
    convert: bool = True
    stochastic: bool = False
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_per_parameter: float = 0.0


def four_ways() -> list[Run]:
    """Grey is what the others are measured by, red is what loses, green and blue are what hmpx does."""
    return [
        Run("FP32", "#8b949e", convert=False),
        Run("FP32 weights, ops in BF16", "#2f81f7"),
        Run("BF16 weights, rounded to nearest", "#e5534b", bf16_weights=True),
        Run("BF16 weights, stochastic rounding", "#2da44e", bf16_weights=True, stochastic=True),
    ]


def load_text() -> tuple[Tensor, Tensor, int]:
    """Characters as integers, the last tenth for validation; and how many different ones there are."""
    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(alphabet)


def batch(data: Tensor, generator: torch.Generator, size: int = BATCH) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 1, (size,), generator=generator)
    rows = torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: nn.Module, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(1)
    return sum(loss_of(model, *batch(data, generator)).item() for _ in range(8)) / 8


def measure(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Bytes of weights, gradients and optimizer state, per parameter."""
    kept = [t for p in model.parameters() for t in (p, p.grad)]
    kept += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in kept) / sum(p.numel() for p in model.parameters())


def train(run: Run, options: argparse.Namespace, data: tuple[Tensor, Tensor, int], progress: Progress) -> None:
    training, validation, characters = data
    torch.manual_seed(0)
    model = CharTransformer(characters)
    if run.bf16_weights:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=options.lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    lists = {"bf16_file_path": options.list} if options.list else {}
    with hmpx.convert(**lists) if run.convert else contextlib.nullcontext():
        for step in range(options.steps + 1):
            if step % options.every == 0 or step == options.steps:
                run.steps.append(step)
                run.losses.append(validate(model, validation))
            if step % 10 == 0 or step == options.steps:
                progress.show(run.name, step, run.losses[-1])
            if step == options.steps:
                break
            optimizer.zero_grad()
            loss_of(model, *batch(training, generator, options.batch)).backward()
            if run.stochastic:
                with hmpx.disable_casts():
                    optimizer.step()
            else:
                optimizer.step()
    run.bytes_per_parameter = measure(model, optimizer)
    progress.done()


class Progress:
    """One line for each training, with the time that is left for all of them."""

    def __init__(self, ways: int, steps: int) -> None:
        self._ways, self._steps, self._way, self._started = ways, steps, 1, time.perf_counter()

    def show(self, name: str, step: int, loss: float) -> None:
        done = (self._way - 1) * self._steps + step
        left = (time.perf_counter() - self._started) / max(done, 1) * (self._ways * self._steps - done)
        bar = "█" * (16 * step // self._steps)
        line = f"\rway {self._way} of {self._ways}  {name:33} {bar:░<16} step {step:4}/{self._steps}"
        remaining = f"{left:4.0f} s left" if done else ""
        print(f"{line}  loss {loss:.3f}  {remaining:11}", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        self._way += 1
        print(file=sys.stderr)


def table(runs: list[Run]) -> str:
    head = f"{'':34} {'validation loss':>15} {'bytes/parameter':>16}"
    rows = [f"{r.name:34} {r.losses[-1]:15.3f} {r.bytes_per_parameter:16.1f}" for r in runs]
    return "\n".join([head, *rows])


def behind(run: Run, fp32: Run) -> list[float]:
    """By how much its validation loss lies above that of FP32, at each validation."""
    return [loss - own for loss, own in zip(run.losses, fp32.losses, strict=True)]


def with_spread(values: Sequence[float], sign: str = "") -> str:
    """The mean of several seeds and their standard deviation, without the digits below that: "+0.24 ± 0.03"."""
    if len(values) < 2:
        return f"{values[0]:{sign}.3f}"
    mean, spread = statistics.fmean(values), statistics.stdev(values)
    digits = min(max(-math.floor(math.log10(spread)), 0), 4) if spread else 4
    return f"{mean:{sign}.{digits}f} ± {spread:.{digits}f}"


def conclusion(runs: list[Run]) -> tuple[str, str]:
    """What the figures say, and the figures."""
    fp32, _, nearest, stochastic = runs
    lost, kept = behind(nearest, fp32)[-1], behind(stochastic, fp32)[-1]
    figures = f"Above FP32 after {fp32.steps[-1]} steps: {lost:+.3f} to nearest, {kept:+.3f} stochastically."
    if abs(kept) < lost / 5:
        return "Rounded to nearest, BF16 weights fall behind FP32. Rounded stochastically, they keep up.", figures
    return "So few steps do not tell the ways to round apart.", figures


@contextlib.contextmanager
def two_panels(path: Path, title: str, steps: int, dark: bool) -> Iterator[tuple[Axes, Axes]]:
    """A picture with losses at the left and the same less those of FP32 at the right."""
    paper, ink = ("#0d1117", "#e6edf3") if dark else ("#ffffff", "#1f2328")
    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    with plt.rc_context({**dict.fromkeys(inks, ink), "figure.facecolor": paper, "axes.facecolor": paper}):
        figure, (losses, differences) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
        figure.suptitle(title, fontsize=13, fontweight="bold")
        yield losses, differences
        losses.set_title("validation loss, nats per character", fontsize=10, loc="left")
        differences.set_title("the same, less that of FP32", fontsize=10, loc="left")
        for axes in (losses, differences):
            axes.set(xlabel="step", xlim=(0, steps))
            axes.grid(alpha=0.15)
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*losses.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=110)
        plt.close(figure)


# Curves that lie on one another: the widest is drawn first.
STYLES = [{"linewidth": 7}, {"linewidth": 3.5}, {"linewidth": 2}, {"linewidth": 2, "linestyle": (0, (3, 2))}]


def plot(runs: list[Run], path: Path, dark: bool = False) -> None:
    with two_panels(path, conclusion(runs)[0], runs[0].steps[-1], dark) as (losses, differences):
        for run, style in zip(runs, STYLES, strict=True):
            label = f"{run.name}, {run.bytes_per_parameter:.0f} bytes a parameter"
            losses.plot(run.steps, run.losses, label=label, color=run.color, **style)
            differences.plot(run.steps, behind(run, runs[0]), color=run.color, **style)
        for run in runs[2:]:
            end = (runs[0].steps[-1], behind(run, runs[0])[-1])
            note = {"xytext": (-4, 6), "textcoords": "offset points", "ha": "right", "fontweight": "bold"}
            differences.annotate(f"{end[1]:+.3f}", end, color=run.color, **note)
        differences.margins(y=0.1)
        losses.set_ylim(top=max(loss for run in runs for loss in run.losses[1:]) + 0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1500 steps, batches twice as large")
    parser.add_argument("--steps", type=int, metavar="N", help="default 160")
    parser.add_argument("--every", type=int, metavar="N", help="validate every N steps, default 20, with --full 50")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--list", metavar="FILE", help="an op list for convert(): names that run in BF16, or YAML")
    parser.add_argument("--threads", type=int, default=1, help="default 1: the model is too small to share out")
    parser.add_argument("--out", type=Path, default=Path("charlm.png"), metavar="PNG")
    parser.add_argument("--dark", type=Path, metavar="PNG", help="the same picture, for a dark background")
    options = parser.parse_args()
    options.steps = options.steps or (1500 if options.full else 160)
    options.batch = BATCH if options.full else BATCH // 2
    options.every = options.every or (50 if options.full else 20)
    torch.set_num_threads(options.threads)
    logging.getLogger("hmpx").setLevel(logging.ERROR)  # it warns of the third way, which is here to be seen
    runs, data = four_ways(), load_text()
    progress = Progress(len(runs), options.steps)
    for run in runs:
        train(run, options, data, progress)
    print(table(runs))
    print(*conclusion(runs), sep="\n")
    plot(runs, options.out)
    if options.dark:
        plot(runs, options.dark, dark=True)
    print(f"curves: {os.path.relpath(options.out)}")


if __name__ == "__main__":
    main()
