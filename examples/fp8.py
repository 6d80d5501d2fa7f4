"""Train the character transformer of `charlm.py` with FP8 products, everywhere and where `hmpx.tune` lets them.

No FP8 hardware is needed: codes are multiplied in BF16, which is exact. ``python examples/fp8.py`` takes one to two
minutes on one thread; ``--seed`` begins from other weights and batches, ``--format nvfp4`` multiplies in FP4.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import charlm
import matplotlib.pyplot as plt
import torch

import hmpx

COLORS = ("#8b949e", "#2f81f7", "#e5534b", "#2da44e")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", default="tensorwise", help="of the fp8 list: tensorwise, mx, mxfp4, nvfp4, ...")
    parser.add_argument("--out", type=Path, default=Path("fp8.png"), metavar="PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, every = charlm.load_text(), max(options.steps // 10, 1)
    low = {"fp8": ["linear"], "fp8_format": options.format, "parameter_dtype": "float32"}  # also in a file: see oplists
    kind = hmpx.Recipe(**low).policy().fp8_format.bits

    _, early = trained(None, min(50, options.steps), 50, data, options.seed)
    generator = torch.Generator().manual_seed(options.seed + 1)
    batches = [charlm.batch(data[0], generator) for _ in range(6)]
    tuned = hmpx.tune(early, batches, charlm.loss_of, low="fp8", lists=low, progress=False)
    print(*(choice for choice in tuned.choices if choice.dtype == "bfloat16"), sep="\n")

    recipes = {
        "FP32": None,
        "BF16": {"parameter_dtype": "float32"},
        f"{kind} everywhere": low,
        f"{kind} as tuned": tuned.recipe,
    }
    shares = dict(zip(list(recipes)[1:], (0.0, 1.0, tuned.share), strict=True))
    curves = {}
    print(f"\n{'':16} {'validation loss':>15} {'above FP32':>11} {'gradient error':>15} {f'products in {kind}':>16}")
    for name, recipe in recipes.items():
        curves[name], _ = trained(recipe, options.steps, every, data, options.seed)
        loss, above = curves[name][-1], curves[name][-1] - curves["FP32"][-1]
        error = share = ""
        if name in shares:
            error = f"{hmpx.compare(early, batches, charlm.loss_of, lists=recipe).gradient_error:.3f}"
            share = f"{shares[name]:.0%}"
        print(f"{name:16} {loss:15.4f} {above:+11.4f} {error:>15} {share:>16}")

    figure, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for color, (name, losses) in zip(COLORS, curves.items(), strict=True):
        above = [a - b for a, b in zip(losses, curves["FP32"], strict=True)]
        axes.plot([i * every for i in range(len(losses))], above, color=color, label=name)
    axes.set(xlabel="step", title="validation loss above FP32, nats per character")
    axes.legend(frameon=False)
    figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
