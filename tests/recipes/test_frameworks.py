"""What goes with a recipe of what frameworks are asked for; `tests/downstream` asks the frameworks themselves."""

from __future__ import annotations

import pytest

import hmpx
from hmpx.recipes.frameworks import AUTOCAST, ENGINE, GRADIENT_NORM, MODEL_DTYPE, FrameworkSetting, refuse
from hmpx.recipes.reading import read_recipe


def test_all_that_does_not_go_with_it_is_said_at_once():
    asked = ("one", ENGINE), ("fine", GRADIENT_NORM), ("two", MODEL_DTYPE)
    with pytest.raises(hmpx.HmpxError, match=r"^one beside a recipe: DeepSpeed holds .*\ntwo beside a recipe: it ca"):
        refuse([FrameworkSetting(*each) for each in asked], read_recipe("neuron-bf16-sr"))
    refuse([FrameworkSetting("bf16=True", AUTOCAST)], hmpx.Recipe(opt_level=None))
