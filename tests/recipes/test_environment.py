"""The recipe that environment variables stand for."""

from __future__ import annotations

import os

import pytest

import hmpx
from hmpx.errors import HmpxError
from hmpx.recipes.reading import read_recipe, recipe_of

EN, SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
LOW, FP32 = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"

VARIABLES = [
    ({"XLA_USE_BF16": "1"}, "xla-use-bf16, weights stochastic"),
    ({"XLA_DOWNCAST_BF16": "1"}, "xla-downcast-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": "1"}, "xla-use-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "0", "XLA_DOWNCAST_BF16": "1"}, "xla-downcast-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "1", EN: "0"}, "xla-use-bf16, weights nearest"),
    ({EN: "1", SEED: "7"}, "neuron-bf16-sr, weights stochastic, seed 7"),
    ({EN: "0"}, None),
    ({SEED: "7"}, None),
    ({"XLA_USE_BF16": ""}, None),
    ({LOW: "", FP32: ""}, None),
]


def test_the_variables_of_neuron_and_xla():
    for environment, meaning in VARIABLES:
        found = recipe_of(environment)
        said = " ".join(f"{name}={value}" for name, value in environment.items())
        assert (found and found[1]) == (meaning and f"{said} is recipe {meaning}")


def test_a_seed_of_neuron_that_is_none_is_refused():
    for seed in ("x", "-1", "1.5", str(2**64)):
        with pytest.raises(HmpxError, match=f"^{SEED}={seed} is no seed: an integer from 0 to"):
            recipe_of({"XLA_USE_BF16": "1", SEED: seed})
    assert recipe_of({EN: "1", SEED: str(2**64 - 1)})[0].seed == 2**64 - 1


def test_the_variables_of_gaudi_are_not_read_and_the_recipe_for_them_is_said(caplog):
    assert recipe_of({LOW: "low.txt", EN: "0"}) is None
    said = f"hmpx: {LOW} is not read; a recipe with extends: gaudi-autocast, bf16_file_path: low.txt does the same"
    assert caplog.messages == [said]


def test_activate_without_a_recipe_is_the_default_lists_where_no_variable_says_anything(monkeypatch, caplog):
    for name in (EN, LOW, FP32, "XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        monkeypatch.delenv(name, raising=False)
    with hmpx.activate() as handle:
        assert handle.recipe.bf16 == read_recipe("hmp-o1").inlined().bf16 and handle.recipe.weights == "stochastic"
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with hmpx.activate() as handle:
        assert handle.recipe.dtype_map and "XLA_USE_BF16" not in os.environ  # torch_xla would act on it too
    assert caplog.messages == ["hmpx: XLA_USE_BF16=1 is recipe xla-use-bf16, weights stochastic"]
