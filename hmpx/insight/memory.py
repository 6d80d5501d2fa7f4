"""What a model of any size takes on each rank, computed; nothing is allocated."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence

from hmpx.insight.report import Field, table
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


def memory_lines(recipes: Mapping[str, Recipe], params: float, ranks: Sequence[int], states: int) -> Iterator[str]:
    """Yield two tables: bytes per parameter by what they are for, and GiB on each rank by how the model is distributed.

    recipes: by name; every way to hold weights where there is none. states: tensors that the optimizer keeps.
    """
    ways = recipes or _WAYS
    prints = {name: recipe.footprint(states) for name, recipe in ways.items()}
    yield f"bytes per parameter, {states} state tensors; MiB: what a step of all of it takes more, by device"
    yield from _table({name: _by_purpose(each, params) for name, each in prints.items()})
    yield ""
    yield f"GiB on each rank, {params:.3g} parameters, without activations; by number of ranks"
    yield from _table(
        {
            f"{name}, {mode}": {f"{n}": each.on_rank(params, n, mode) / 2**30 for n in ranks}
            for name, each in prints.items()
            for mode in MODES
            if mode == "fsdp2" or not ways[name].release_gradients  # see `_notes`
        }
    )
    yield from _notes(ways)
    for name in (name for name, each in prints.items() if each.copies):
        yield f"a step of {name} takes {prints[name].copies} bytes of each element of the largest parameter, or more"


def _table(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    def column(name: str) -> Field:
        return Field(f"{name:>12}", lambda row: f"{figures[row][name]:.2f}", right=True)

    columns = next(iter(figures.values()))
    return table([Field(""), *map(column, columns)], [*figures], sys.maxsize)


def _by_purpose(each: Footprint, params: float) -> dict[str, float]:
    held = {part: getattr(each, part) for part in ("weights", "gradients", "masters", "state")}
    steps = {f"{device}, MiB": each.transient(params, device) / 2**20 for device in ("cpu", "cuda")}
    return {**held, "sum": sum(held.values()), "ddp buckets": each.buckets, "FP8 codes": each.codes, **steps}


def _notes(ways: Mapping[str, Recipe]) -> Iterator[str]:
    """Say what is left out, and why: exceptions by name, and the rows of recipes that have not all of them."""
    for name, recipe in ways.items():
        if patterns := [*recipe.parameters]:
            yield (
                f"{name} is counted without its exceptions by name ({', '.join(map(repr, patterns))}), as there is no "
                "model; Recipe.bytes_per_parameter(name=...) counts them"
            )
    for name in (name for name, recipe in ways.items() if recipe.release_gradients):
        yield (
            f"{name} has no rows for {' and '.join(mode for mode in MODES if mode != 'fsdp2')}: release_gradients "
            "steps before DistributedDataParallel has reduced the gradients, so hmpx refuses the two together"
        )
