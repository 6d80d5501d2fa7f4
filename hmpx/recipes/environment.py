"""What the environment variables of Neuron and PyTorch/XLA ask for, as a recipe.

Sources: PyTorch/XLA (removed after 2.8), AWS Neuron documentation, "Migration From XLA_USE_BF16/XLA_DOWNCAST_BF16" and
"Neuron Rounding Modes".
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import replace

from hmpx.errors import HmpxError
from hmpx.recipes.recipe import Recipe, read_recipe

_EN, _SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
# The first that is on decides, as it does in PyTorch/XLA.
_RECIPES = {"XLA_USE_BF16": "xla-use-bf16", "XLA_DOWNCAST_BF16": "xla-downcast-bf16", _EN: "neuron-bf16-sr"}


def take_over(environment: MutableMapping[str, str]) -> None:
    """Unset what torch_xla would act on itself, by calling BF16 tensors FP32."""
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        environment.pop(name, None)


def recipe_of(environment: Mapping[str, str]) -> tuple[Recipe, str] | None:
    """The recipe that these variables mean, and that in a sentence; None if they mean none.

    Stochastic rounding is on, as Neuron has it with either of the XLA variables, unless it is turned off by name.

    Raises:
        HmpxError: a seed that is no seed.
    """
    asked = {name: environment[name] for name in (*_RECIPES, _SEED) if environment.get(name)}
    deciding = next((name for name in _RECIPES if asked.get(name, "0") != "0"), None)
    if deciding is None:
        return None
    recipe = read_recipe(_RECIPES[deciding])
    if asked.get(_EN) == "0":
        recipe = replace(recipe, weights="nearest")
    if _SEED in asked:
        if not asked[_SEED].isdecimal() or int(asked[_SEED]) >= 2**64:
            raise HmpxError(f"{_SEED}={asked[_SEED]} is no seed: an integer from 0 to 2**64 - 1")
        recipe = replace(recipe, seed=int(asked[_SEED]))
    said = " ".join(f"{name}={value}" for name, value in asked.items())
    but = "".join(f", {key} {getattr(recipe, key)}" for key in ("weights", "seed") if getattr(recipe, key) is not None)
    return recipe, f"{said} is recipe {_RECIPES[deciding]}{but}"
