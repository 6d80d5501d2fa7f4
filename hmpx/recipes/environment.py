"""What the environment variables of Neuron and PyTorch/XLA ask for, as a recipe.

Sources: PyTorch/XLA (removed after 2.8), AWS Neuron documentation, "Migration From XLA_USE_BF16/XLA_DOWNCAST_BF16" and
"Neuron Rounding Modes".
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hmpx.errors import HmpxError
from hmpx.recipes.recipe import Recipe, changed
from hmpx.recipes.stated import read_recipe

_EN, _SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
# The first of these that is set to anything but 0 decides, as in PyTorch/XLA.
_RECIPES = {"XLA_USE_BF16": "xla-use-bf16", "XLA_DOWNCAST_BF16": "xla-downcast-bf16", _EN: "neuron-bf16-sr"}


def take_over(environment: MutableMapping[str, str]) -> None:
    """Unset XLA_USE_BF16 and XLA_DOWNCAST_BF16, or torch_xla would act on them too: it stores FP32 tensors as BF16."""
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        environment.pop(name, None)


def recipe_of(environment: Mapping[str, str]) -> tuple[Recipe, str] | None:
    """The recipe that these variables stand for, and a sentence that says so; None if none of them is on.

    With XLA_USE_BF16 or XLA_DOWNCAST_BF16, weights are rounded stochastically, as Neuron does it, unless
    NEURON_RT_STOCHASTIC_ROUNDING_EN is 0.

    Raises:
        HmpxError: NEURON_RT_STOCHASTIC_ROUNDING_SEED is not an integer in [0, 2^64).
    """
    asked = {name: environment[name] for name in (*_RECIPES, _SEED) if environment.get(name)}
    deciding = next((name for name in _RECIPES if asked.get(name, "0") != "0"), None)
    if deciding is None:
        return None
    recipe = read_recipe(_RECIPES[deciding])
    if asked.get(_EN) == "0":
        recipe = changed(recipe, weights="nearest")
    if _SEED in asked:
        if not asked[_SEED].isdecimal() or int(asked[_SEED]) >= 2**64:
            raise HmpxError(f"{_SEED}={asked[_SEED]} is no seed: an integer from 0 to 2**64 - 1")
        recipe = changed(recipe, seed=int(asked[_SEED]))
    said = " ".join(f"{name}={value}" for name, value in asked.items())
    differs = {key: getattr(recipe, key) for key in ("weights", "seed")}
    settings = "".join(f", {key} {value}" for key, value in differs.items() if value is not None)
    return recipe, f"{said} is recipe {_RECIPES[deciding]}{settings}"
