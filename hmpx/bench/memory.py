"""``bench memory``: what a model of any size takes on each rank, computed; nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hmpx.bench.measure import Bench, Line
from hmpx.recipes.reading import read_recipe
from hmpx.recipes.recipe import Recipe
from hmpx.updates.footprint import MODES, Footprint

_WAYS = {
    "FP32 weights": Recipe(parameter_dtype="float32"),
    "stochastic or nearest": Recipe(),
    "stochastic, BF16 state": Recipe(state_dtype="bfloat16"),
    "stochastic, 8-bit state": Recipe(state_dtype="8bit"),
    "stochastic, 4-bit state": Recipe(state_dtype="4bit"),
    "split8, 8-bit state": Recipe(weights="split8", state_dtype="8bit"),
    "split": Recipe(weights="split"),
    "master": Recipe(weights="master"),
    "master, FP32 gradients": Recipe(weights="master", use_fp32_grad_acc=True),
}


def run(params: float, ranks: Sequence[int], recipes: Sequence[str], states: int) -> list[Bench]:
    """Compute bytes per parameter by what they are for, and GiB on each rank by how the model is distributed."""
    ways = {name: read_recipe(name) for name in recipes} or _WAYS
    prints = {name: recipe.footprint(states) for name, recipe in ways.items()}
    return [
        Bench(
            f"bytes per parameter, {states} state tensors; MiB: what a step of all of it takes more, by device",
            [Line(name, _by_purpose(each, params)) for name, each in prints.items()],
        ),
        Bench(
            f"GiB on each rank, {params:.3g} parameters, without activations; by number of ranks",
            [
                Line(f"{name}, {mode}", {f"{n}": each.on_rank(params, n, mode) / 2**30 for n in ranks})
                for name, each in prints.items()
                for mode in MODES
                if mode == "fsdp2" or not ways[name].release_gradients  # see `_notes`
            ],
            list(_notes(ways)),
        ),
    ]


def _by_purpose(each: Footprint, params: float) -> dict[str, float]:
    held = {part: getattr(each, part) for part in ("weights", "gradients", "masters", "state")}
    steps = {f"{device}, MiB": each.transient(params, device) / 2**20 for device in ("cpu", "cuda")}
    return {**held, "sum": sum(held.values()), "ddp buckets": each.buckets, "FP8 codes": each.codes, **steps}


def _notes(ways: Mapping[str, Recipe]) -> Iterator[str]:
    """Say what is left out, and why: exceptions by name, and the rows of recipes that have not all of them."""
    for name, recipe in ways.items():
        if patterns := [*recipe.module_dtypes, *recipe.parameters]:
            yield (
                f"{name} is counted without its exceptions by name ({', '.join(map(repr, patterns))}), as there is no "
                "model; Recipe.bytes_per_parameter(name=...) counts them"
            )
    for name in (name for name, recipe in ways.items() if recipe.release_gradients):
        yield (
            f"{name} has no rows for {' and '.join(mode for mode in MODES if mode != 'fsdp2')}: release_gradients "
            "steps before DistributedDataParallel has reduced the gradients, so hmpx refuses the two together"
        )
