"""What frameworks are asked for beside a recipe: which of it goes with one, in words that name both."""

from __future__ import annotations

import pytest

import hmpx
from hmpx.recipes.frameworks import (
    ACCUMULATION,
    AUTOCAST,
    ENGINE,
    GRADIENT_NORM,
    MODEL_DTYPE,
    FrameworkSetting,
    conflict,
    refuse,
)
from hmpx.recipes.stated import read_recipe

LEAN, USUAL = read_recipe("lean"), read_recipe("neuron-bf16-sr")
WEIGHTS_ALONE = hmpx.Recipe(opt_level=None)


@pytest.mark.parametrize(
    ("what", "recipe", "said"),
    [
        (AUTOCAST, USUAL, "mine beside a recipe: its torch.autocast would cast the ops once more"),
        (AUTOCAST, WEIGHTS_ALONE, ""),
        *((MODEL_DTYPE, recipe, "mine beside a recipe: it casts the model itself") for recipe in (LEAN, WEIGHTS_ALONE)),
        *((ENGINE, recipe, "mine beside a recipe: DeepSpeed holds and updates") for recipe in (LEAN, WEIGHTS_ALONE)),
        (ACCUMULATION, LEAN, "mine adds up gradients, which the recipe's release_gradients has freed by then"),
        (GRADIENT_NORM, LEAN, "mine clips or measures gradients before the step, which the recipe's release_gradients"),
        *((what, USUAL, "") for what in (ACCUMULATION, GRADIENT_NORM)),
    ],
)
def test_what_goes_with_a_recipe(what, recipe, said):
    found = conflict(FrameworkSetting("mine", what), recipe)
    assert found.startswith(said) and bool(found) == bool(said)


def test_all_that_does_not_go_with_it_is_said_at_once():
    asked = ("one", ENGINE), ("fine", GRADIENT_NORM), ("two", MODEL_DTYPE)
    with pytest.raises(hmpx.HmpxError, match=r"^one beside .*\ntwo beside [^\n]*$"):
        refuse([FrameworkSetting(*each) for each in asked], USUAL)
    refuse([FrameworkSetting("bf16=True", AUTOCAST)], WEIGHTS_ALONE)
