"""The recipe that environment variables stand for where none is named: those of PyTorch/XLA and Neuron.

Sources: PyTorch/XLA (removed after 2.8); AWS Neuron documentation, "Migration From XLA_USE_BF16/XLA_DOWNCAST_BF16" and
"Neuron Rounding Modes".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from hmpx.errors import HmpxError
from hmpx.recipes.reading import read_recipe
from hmpx.recipes.recipe import Recipe, changed

logger = logging.getLogger("hmpx")

_ROUNDING, _SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
# The first of these that is set to anything but 0 decides, as in PyTorch/XLA.
_RECIPES = {"XLA_USE_BF16": "xla-use-bf16", "XLA_DOWNCAST_BF16": "xla-downcast-bf16", _ROUNDING: "neuron-bf16-sr"}
# Gaudi's, which name files of ops: hmpx does not read these variables.
_GAUDI = {"PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": "bf16", "PT_HPU_AUTOCAST_FP32_OPS_LIST": "fp32"}


def recipe_of_environment() -> tuple[Recipe, str] | None:
    """Return `recipe_of` this process, and unset XLA's variables: torch_xla would store FP32 tensors as BF16."""
    found = recipe_of(os.environ)
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        os.environ.pop(name, None)
    return found


def recipe_of(environment: Mapping[str, str]) -> tuple[Recipe, str] | None:
    """Return the recipe that these variables stand for, and a sentence that says so; None if none of them is on.

    With XLA_USE_BF16 or XLA_DOWNCAST_BF16, weights are rounded stochastically, as Neuron does it, unless
    NEURON_RT_STOCHASTIC_ROUNDING_EN is 0.

    Raises:
        HmpxError: NEURON_RT_STOCHASTIC_ROUNDING_SEED is not an integer in [0, 2^64).
    """
    asked = {name: environment[name] for name in (*_RECIPES, _SEED) if environment.get(name)}
    deciding = next((name for name in _RECIPES if asked.get(name, "0") != "0"), None)
    if deciding is None:
        for name, side in _GAUDI.items():
            if environment.get(name):
                keys = f"extends: gaudi-autocast, {side}_file_path: {environment[name]}"
                logger.warning("hmpx: %s is not read; a recipe with %s does the same", name, keys)
        return None
    recipe = read_recipe(_RECIPES[deciding])
    if asked.get(_ROUNDING) == "0":
        recipe = changed(recipe, weights="nearest")
    if _SEED in asked:
        if not asked[_SEED].isdecimal() or int(asked[_SEED]) >= 2**64:
            raise HmpxError(f"{_SEED}={asked[_SEED]} is no seed: an integer from 0 to 2**64 - 1")
        recipe = changed(recipe, seed=int(asked[_SEED]))
    differs = {key: getattr(recipe, key) for key in ("weights", "seed")}
    settings = "".join(f", {key} {value}" for key, value in differs.items() if value is not None)
    return recipe, f"{_said(asked)} is recipe {_RECIPES[deciding]}{settings}"


def _said(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in variables.items())
