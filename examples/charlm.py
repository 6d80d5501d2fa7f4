"""Train a small character transformer four ways and see what the precision of its weight updates does.

The text is English that ships with Python: the help topics of `pydoc`. Every way starts from the same weights and sees
the same batches. Run it with ``python examples/charlm.py``; about two minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
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
    bf16_weights: bool = False
    convert: bool = False
    stochastic: bool = False
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    bytes_per_parameter: float = 0.0
    seconds: float = 0.0


def load_text() -> tuple[Tensor, Tensor, int]:
    """Characters as integers, the last tenth for validation; and how many different ones there are."""
    text = "\n".join(topics[key] for key in sorted(topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(alphabet)


def batch(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
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


def train(run: Run, options: argparse.Namespace, data: tuple[Tensor, Tensor, int]) -> None:
    training, validation, characters = data
    torch.manual_seed(0)
    model = CharTransformer(characters)
    if run.bf16_weights:
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=options.lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    lists = {"bf16_file_path": options.list} if options.list else {}
    started = time.perf_counter()
    with hmpx.convert(**lists) if run.convert else contextlib.nullcontext():
        for step in range(options.steps + 1):
            if step % options.every == 0 or step == options.steps:
                run.steps.append(step)
                run.losses.append(validate(model, validation))
                progress(run, step, options.steps)
            if step == options.steps:
                break
            optimizer.zero_grad()
            loss_of(model, *batch(training, generator)).backward()
            if run.stochastic:
                with hmpx.disable_casts():
                    optimizer.step()
            else:
                optimizer.step()
    run.seconds = time.perf_counter() - started
    run.bytes_per_parameter = measure(model, optimizer)
    print(file=sys.stderr)


def progress(run: Run, step: int, steps: int) -> None:
    bar = "█" * (24 * step // steps)
    line = f"\r{run.name:32} {bar:░<24} step {step:4}/{steps}  validation loss {run.losses[-1]:.3f} "
    print(line, end="", file=sys.stderr, flush=True)


def table(runs: list[Run]) -> str:
    head = f"{'':32} {'validation loss':>15} {'bytes/parameter':>16} {'seconds':>8}"
    rows = [f"{r.name:32} {r.losses[-1]:15.3f} {r.bytes_per_parameter:16.1f} {r.seconds:8.1f}" for r in runs]
    return "\n".join([head, *rows])


def plot(runs: list[Run], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    widths = (6.0, 3.0, 1.5, 1.5)  # three of the curves lie on one another
    for run, width, style in zip(runs, widths, ("-", "-", "-", "--"), strict=True):
        label = f"{run.name}: {run.losses[-1]:.3f}, {run.bytes_per_parameter:.0f} bytes/parameter"
        axes.plot(run.steps, run.losses, style, linewidth=width, label=label)
    axes.set(xlabel="step", ylabel="validation loss (nats per character)", title="One model, one text, four precisions")
    axes.set_ylim(top=sorted(loss for run in runs for loss in run.losses[1:])[-1] + 0.1)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=50, metavar="N", help="validate every N steps")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--list", metavar="FILE", help="an op list for convert(): names that run in BF16, or YAML")
    parser.add_argument("--out", type=Path, default=Path("charlm.png"), metavar="PNG")
    options = parser.parse_args()
    runs = [
        Run("FP32"),
        Run("FP32 weights, hmpx.convert()", convert=True),
        Run("BF16 weights, step()", bf16_weights=True),
        Run("BF16 weights, disable_casts()", bf16_weights=True, stochastic=True),
    ]
    data = load_text()
    for run in runs:
        train(run, options, data)
    print(table(runs))
    plot(runs, options.out)
    print(f"curves: {options.out}")


if __name__ == "__main__":
    main()
