"""Train the character transformer under every recipe, with several seeds, and set the losses side by side.

Beside the recipes stand plain FP32 and plain BF16: BF16 weights updated with rounding to nearest, as torch does it. The
gap between the two is what a recipe for BF16 weights has to close; the table says how much of it each one does. All
weights are judged alike: the validation loss is computed in FP32, with the weights as they are at that step.

``python examples/compare_recipes.py``; about half an hour on two CPU cores, less with ``--steps`` or ``--recipes``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from charlm import CharTransformer, Progress, batch, load_text, loss_of, validate

import hmpx
from hmpx.recipes.reading import read_recipe, recipe_names

FP32, NEAREST = "plain FP32", "plain BF16"


@dataclass
class Way:
    """One way to train, and its validation losses: seed -> step -> loss."""

    name: str
    bytes_per_parameter: float
    losses: dict[int, dict[int, float]] = field(default_factory=dict)

    def mean(self, step: int) -> float:
        return statistics.fmean(losses[step] for losses in self.losses.values())

    def last(self) -> list[float]:
        return [losses[max(losses)] for losses in self.losses.values()]


def ways(names: list[str]) -> list[Way]:
    plain = [Way(FP32, sum(hmpx.Recipe(parameter_dtype="float32").bytes_per_parameter().values())), Way(NEAREST, 8)]
    return plain + [Way(name, sum(read_recipe(name).bytes_per_parameter().values())) for name in names]


def train(way: Way, seed: int, options: argparse.Namespace, data: tuple, progress: Progress) -> None:
    """A training loop that knows nothing of recipes: `activate` is all there is, and for FP16 a scale of the loss."""
    training, validation, characters = data
    plain = way.name in (FP32, NEAREST)
    losses = way.losses.setdefault(seed, {})
    with contextlib.nullcontext() if plain else hmpx.activate(way.name) as handle:
        scaler = torch.amp.GradScaler("cpu", enabled=not plain and handle.recipe.low_precision == "float16")
        torch.manual_seed(seed)
        model = CharTransformer(characters)
        if way.name == NEAREST:
            model.bfloat16()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=options.lr, weight_decay=0.01)
        generator = torch.Generator().manual_seed(seed)
        for step in range(options.steps + 1):
            if step % options.every == 0 or step == options.steps:
                with hmpx.disable_casts():
                    losses[step] = validate(copy.deepcopy(model).float(), validation)
                progress.show(f"{way.name}, seed {seed}", step, losses[step])
            if step < options.steps:
                optimizer.zero_grad()
                scaler.scale(loss_of(model, *batch(training, generator))).backward()
                scaler.step(optimizer)
                scaler.update()
    progress.done()


def recovered(way: Way, fp32: Way, nearest: Way) -> float:
    """Percent of the gap between plain BF16 and plain FP32 that is closed, in the mean over the seeds."""
    low, high = statistics.fmean(fp32.last()), statistics.fmean(nearest.last())
    return 100 * (high - statistics.fmean(way.last())) / (high - low)


def table(found: list[Way]) -> str:
    fp32, nearest, *_ = found
    lines = [f"{'':30} {'validation loss':>16} {'over seeds':>11} {'gap closed':>11} {'bytes/parameter':>16}"]
    for way in found:
        last = way.last()
        spread = f"±{statistics.stdev(last):.3f}" if len(last) > 1 else ""
        lines.append(
            f"{way.name:30} {statistics.fmean(last):16.3f} {spread:>11} {recovered(way, fp32, nearest):9.0f} % "
            f"{way.bytes_per_parameter:16g}"
        )
    return "\n".join(lines)


def plot(found: list[Way], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(10, 5.2), layout="constrained")
    zoom = axes.inset_axes([0.42, 0.45, 0.55, 0.48])
    colors = plt.get_cmap("tab20").colors
    steps = sorted(next(iter(found[0].losses.values())))
    for i, way in enumerate(found):
        means = [way.mean(step) for step in steps]
        style = {"color": "black" if i < 2 else colors[i % 20], "linewidth": 3 if i < 2 else 1.3}
        style["linestyle"] = ("-", "--")[i % 2]
        axes.plot(
            steps, means, label=f"{way.name}: {means[-1]:.3f}, {way.bytes_per_parameter:g} bytes/parameter", **style
        )
        if way.name != NEAREST:
            zoom.plot(steps, [mean - found[0].mean(step) for step, mean in zip(steps, means, strict=True)], **style)
    axes.set(xlabel="step", ylabel="validation loss (nats per character)", title="One model, one text, every recipe")
    axes.grid(alpha=0.3)
    zoom.grid(alpha=0.3)
    zoom.set_title(f"difference from {FP32}", fontsize=8)
    zoom.tick_params(labelsize=7)
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=recipe_names(), metavar="NAME", help="default: all of them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=100, metavar="N", help="validate every N steps")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, default=Path("recipes.png"), metavar="PNG")
    options = parser.parse_args()
    found, data = ways(options.recipes), load_text()
    progress = Progress(len(found) * options.seeds, options.steps)
    for way in found:
        for seed in range(options.seeds):
            train(way, seed, options, data, progress)
    print(table(found))
    plot(found, options.out)
    print(f"curves: {options.out}")


if __name__ == "__main__":
    main()
