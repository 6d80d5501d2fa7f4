"""The recipe that environment variables stand for."""

import os

import pytest

import hmpx
from hmpx.errors import HmpxError
from hmpx.recipes.reading import read_recipe, recipe_of

EN, SEED = "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED"
LOW, FP32 = "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST"
OLDER = {LOW: "LOWER_LIST", FP32: "FP32_LIST"}  # `autocast_helpers.h` of Gaudi's bridge has both

VARIABLES = [
    ({"XLA_USE_BF16": "1"}, "xla-use-bf16, weights stochastic"),
    ({"XLA_DOWNCAST_BF16": "1"}, "xla-downcast-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "1", "XLA_DOWNCAST_BF16": "1"}, "xla-use-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "0", "XLA_DOWNCAST_BF16": "1"}, "xla-downcast-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "1", EN: "0"}, "xla-use-bf16, weights nearest"),
    ({EN: "1", SEED: "7"}, "neuron-bf16-sr, weights stochastic, seed 7"),
    ({"XLA_USE_BF16": "1", EN: "false"}, "xla-use-bf16, weights nearest"),
    ({EN: "true"}, "neuron-bf16-sr, weights stochastic"),
    # PyTorch/XLA's GetEnvBool: "true", or else C's atoi of it
    ({"XLA_USE_BF16": "true"}, "xla-use-bf16, weights stochastic"),
    ({"XLA_USE_BF16": "2"}, "xla-use-bf16, weights stochastic"),
    ({"XLA_USE_BF16": " -01x"}, "xla-use-bf16, weights stochastic"),
    *(({"XLA_USE_BF16": word}, None) for word in ("false", "no", "00", "off", "True", "x1")),
    ({"XLA_USE_BF16": "no", "XLA_DOWNCAST_BF16": "1"}, "xla-downcast-bf16, weights stochastic"),
    ({EN: "false"}, None),
    ({EN: "0"}, None),
    ({SEED: "7"}, None),
    ({"XLA_USE_BF16": ""}, None),
    ({LOW: "", FP32: ""}, None),
]


def test_the_variables_of_neuron_and_xla():
    for environment, meaning in VARIABLES:
        found = recipe_of(environment)
        said = " ".join(f"{name}={value}" for name, value in environment.items())
        assert (found and found[1]) == (meaning and f"{said} is recipe {meaning}"), environment


def test_a_variable_that_is_off_by_a_word_that_may_mean_on_is_told_so(caplog):
    for word in ("0", "false", "1", ""):
        recipe_of({"XLA_USE_BF16": word})
    assert not caplog.messages
    recipe_of({"XLA_USE_BF16": "True", EN: "1"})
    assert caplog.messages == ["hmpx: XLA_USE_BF16=True is off: 1 and true switch it on"]


def test_a_seed_of_neuron_that_is_none_is_refused():
    for seed in ("x", "-1", "1.5", str(2**64)):
        with pytest.raises(HmpxError, match=f"^{SEED}={seed} is no seed: an integer from 0 to"):
            recipe_of({"XLA_USE_BF16": "1", SEED: seed})
    assert recipe_of({EN: "1", SEED: str(2**64 - 1)})[0].seed == 2**64 - 1


def test_the_variables_of_gaudi_are_not_read_and_the_recipe_for_them_is_said(caplog):
    said = "hmpx: {} is not read; a recipe with extends: gaudi-autocast, {}_file_path: x.txt does the same"
    for names in (OLDER.keys(), OLDER.values()):
        for name, side in zip(names, ("bf16", "fp32"), strict=True):
            caplog.clear()
            assert recipe_of({name: "x.txt", EN: "0"}) is None
            assert recipe_of({name: "x.txt", EN: "1"})[0].weights == "stochastic"
            assert caplog.messages == [said.format(name, side)] * 2


def test_activate_without_a_recipe_is_the_default_lists_where_no_variable_says_anything(monkeypatch, caplog):
    for name in (EN, *OLDER.keys(), *OLDER.values(), "XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        monkeypatch.delenv(name, raising=False)
    with hmpx.activate() as handle:
        assert handle.recipe.bf16 == read_recipe("hmp-o1").inlined().bf16 and handle.recipe.weights == "stochastic"
    monkeypatch.setenv("XLA_USE_BF16", "1")
    with hmpx.activate() as handle:
        assert handle.recipe.dtype_map and "XLA_USE_BF16" not in os.environ  # torch_xla would act on it too
    assert caplog.messages == ["hmpx: XLA_USE_BF16=1 is recipe xla-use-bf16, weights stochastic"]
