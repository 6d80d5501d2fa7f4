"""Train the character transformer of `charlm.py` with FP8 products, everywhere and where `hmpx.tune` lets them.

No FP8 hardware is needed: codes are multiplied in BF16, which is exact. ``python examples/fp8.py`` trains with three
seeds and takes three minutes on two cores; ``--format nvfp4`` multiplies in FP4.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import charlm
import torch

import hmpx

COLORS = ("#8b949e", "#2f81f7", "#e5534b", "#2da44e")


@dataclass
class Way:
    """One way to train; a number for each seed, and the curves."""

    above: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    curves: list[list[float]] = field(default_factory=list)


def fresh(characters: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Generator]:
    torch.manual_seed(seed)
    model = charlm.CharTransformer(-(-characters // 16) * 16)  # FP8 hardware takes multiples of 16
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3, weight_decay=0.01)
    return model, optimizer, torch.Generator().manual_seed(seed)


def trained(recipe, steps, every, data, seed):
    """Validation losses while a model trains under a recipe; and the model."""
    training, validation, characters = data
    model, optimizer, generator = fresh(characters, seed)
    if recipe is not None:
        hmpx.prepare(model, optimizer, recipe)
    losses = []
    for step in range(steps + 1):
        if step % every == 0:
            losses.append(charlm.validate(model, validation))
        if step < steps:
            optimizer.zero_grad()
            charlm.loss_of(model, *charlm.batch(training, generator)).backward()
            optimizer.step()
    hmpx.restore(optimizer)
    return losses, model


def one_seed(asked: tuple[int, argparse.Namespace, dict, str]) -> tuple[dict, str]:
    """For each way: the curve, the gradient error and the share of the products in FP8; and what tune keeps in BF16."""
    seed, options, low, kind = asked
    torch.set_num_threads(1)
    data, every = charlm.load_text(), max(options.steps // 10, 1)
    _, early = trained(None, min(50, options.steps), 50, data, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    batches = [charlm.batch(data[0], generator) for _ in range(6)]
    tuned = hmpx.tune(early, batches, charlm.loss_of, low="fp8", lists=low, progress=False)
    recipes = {
        "FP32": (None, 0.0),
        "BF16": ({"parameter_dtype": "float32"}, 0.0),
        f"{kind} everywhere": (low, 1.0),
        f"{kind} as tuned": (tuned.recipe, tuned.share),
    }
    found = {}
    for name, (recipe, share) in recipes.items():
        curve, _ = trained(recipe, options.steps, every, data, seed)
        lists = recipe and hmpx.compare(early, batches, charlm.loss_of, lists=recipe, progress=False)
        found[name] = curve, lists.gradient_error if lists else 0.0, share
    kept = "\n".join(f"seed {seed}: {choice}" for choice in tuned.choices if choice.dtype == "bfloat16")
    return found, kept


def conclusion(ways: dict[str, Way]) -> str:
    """What the last points say, where the difference is larger than its spread over the seeds."""
    (name, everywhere), (_, tuned) = [*ways.items()][2:]
    less = [a - b for a, b in zip(everywhere.above, tuned.above, strict=True)]
    if len(less) > 1 and statistics.fmean(less) > statistics.stdev(less):
        return f"Above FP32: {name} loses more than as tuned."
    return f"{name} and as tuned lie no farther apart than seeds do."


def plot(ways: dict[str, Way], every: int, path: Path, dark: bool = False) -> None:
    """Means over the seeds, and at the right the standard deviation around them."""
    points = len(ways["FP32"].curves[0])
    steps = [i * every for i in range(points)]
    with charlm.two_panels(path, conclusion(ways), steps[-1], dark) as (losses, differences):
        for (name, way), color, style in zip(ways.items(), COLORS, charlm.STYLES, strict=True):
            mean = [statistics.fmean(each) for each in zip(*way.curves, strict=True)]
            losses.plot(steps, mean, label=name, color=color, **style)
            pairs = zip(way.curves, ways["FP32"].curves, strict=True)
            above = [*zip(*([a - b for a, b in zip(*pair, strict=True)] for pair in pairs), strict=True)]
            middle = [statistics.fmean(each) for each in above]
            around = [statistics.stdev(each) if len(each) > 1 else 0.0 for each in above]
            low, high = ([m + sign * s for m, s in zip(middle, around, strict=True)] for sign in (-1, 1))
            differences.plot(steps, middle, color=color, **style)
            differences.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        losses.fill_between([], [], color=COLORS[0], alpha=0.3, linewidth=0, label="standard deviation over the seeds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="seeds at a time, each on one core")
    parser.add_argument("--format", default="tensorwise", help="of the fp8 list: tensorwise, mx, mxfp4, nvfp4, ...")
    parser.add_argument("--out", type=Path, default=Path("fp8.png"), metavar="PNG")
    parser.add_argument("--dark", type=Path, metavar="PNG", help="the same picture, for a dark background")
    options = parser.parse_args()
    low = {"fp8": ["linear"], "fp8_format": options.format, "parameter_dtype": "float32"}  # also in a file: see oplists
    kind = hmpx.Recipe(**low).policy().fp8_format.bits
    ways: dict[str, Way] = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for found, kept in pool.imap(one_seed, [(seed, options, low, kind) for seed in range(options.seeds)]):
            print(kept)
            for name, (curve, error, share) in found.items():
                way = ways.setdefault(name, Way())
                way.curves.append(curve)
                way.above.append(curve[-1] - found["FP32"][0][-1])
                way.errors.append(error)
                way.shares.append(share)
    print(f"\n{'':16} {'validation loss':>15} {'above FP32':>18} {'gradient error':>15} {f'products in {kind}':>16}")
    for name, way in ways.items():
        loss, above = charlm.with_spread([curve[-1] for curve in way.curves]), charlm.with_spread(way.above, "+")
        error, share = charlm.with_spread(way.errors), f"{statistics.fmean(way.shares):.0%}"
        rest = ("", "", "") if name == "FP32" else (above, error, share)
        print(f"{name:16} {loss:>15} {rest[0]:>18} {rest[1]:>15} {rest[2]:>16}")
    print(conclusion(ways))
    every = max(options.steps // 10, 1)
    plot(ways, every, options.out)
    if options.dark:
        plot(ways, every, options.dark, dark=True)


if __name__ == "__main__":
    main()
