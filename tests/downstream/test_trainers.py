"""What hmpx promises in every trainer's hands: the bits of a loop by hand, of an unbroken run, of an eager one."""

import copy
import logging
import warnings

import pytest
import torch

import hmpx
from tests.downstream.by_hand import RECIPES, bits, net, state_bits
from tests.downstream.trainers import TRAINERS

pytestmark = pytest.mark.filterwarnings("ignore")
SPLIT = {**RECIPES["master"], "weights": "split"}

RUNS = [  # a trainer, a way to hold weights, steps that a gradient is summed over, how it is clipped
    ("lightning", "FP32 weights", 2, "norm"),
    ("lightning", "stochastic", 1, ""),
    ("lightning", "stochastic", 4, "value"),
    ("lightning", "stochastic, released", 1, ""),
    ("lightning", "master", 2, "norm"),
    ("transformers", "FP32 weights", 1, "norm"),
    ("transformers", "stochastic", 2, "norm"),
    ("transformers", "master", 1, ""),
    ("transformers", "master", 2, "norm"),
    ("accelerate, before", "stochastic", 1, ""),
    ("accelerate, before", "master", 2, "norm"),
    ("accelerate, after", "stochastic", 2, "norm"),
    ("accelerate, after", "FP32 weights", 1, ""),
]


@pytest.mark.parametrize("trainer, way, accumulate, clip", RUNS)
def test_a_run_has_the_bits_of_a_loop_by_hand(trainer, way, accumulate, clip, tmp_path):
    model, _ = TRAINERS[trainer].fit(RECIPES[way], tmp_path, accumulate, clip)
    hmpx.restore()
    assert bits(model) == bits(TRAINERS[trainer].by_hand(way.split(",")[0], accumulate, clip))


@pytest.mark.parametrize("trainer", TRAINERS)
def test_clipping_of_released_gradients_is_refused(trainer, tmp_path):
    with pytest.raises(hmpx.HmpxError, match="release_gradients=False"):
        copy.copy(TRAINERS[trainer]).fit(RECIPES["stochastic, released"], tmp_path, clip="norm")


def ours(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "hmpx"]


@pytest.mark.parametrize("trainer", ["lightning", "transformers", "accelerate, before"])
def test_a_program_that_knows_nothing_of_hmpx_has_the_same_bits(trainer, tmp_path, caplog):
    """Under a recipe that is in force from the outside, as by ``python -m hmpx run``."""
    with caplog.at_level(logging.WARNING, "hmpx"), hmpx.activate(RECIPES["stochastic"]):
        model, _ = TRAINERS[trainer].fit(None, tmp_path)
    assert bits(model) == bits(TRAINERS[trainer].by_hand("stochastic")) and not ours(caplog)


RESUMED = [
    *(("lightning", recipe) for recipe in ("hmp-o1", "torchao-bf16-sr", RECIPES["master"], SPLIT)),
    *(("transformers", recipe) for recipe in ("torchao-bf16-sr", RECIPES["stochastic"], SPLIT)),
    *(("accelerate, before", recipe) for recipe in ("torchao-bf16-sr", SPLIT)),
    *(("accelerate, after", recipe) for recipe in (RECIPES["master"], RECIPES["stochastic"])),
]


@pytest.mark.parametrize("trainer, recipe", RESUMED, ids=str)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(trainer, recipe, tmp_path, caplog):
    found = []
    with caplog.at_level(logging.WARNING, "hmpx"):
        for model, optimizer in TRAINERS[trainer].resumed(recipe, tmp_path):
            found.append((bits(model), state_bits(optimizer)))
            torch.manual_seed(99)
    assert found[0] == found[1] and not ours(caplog)


@pytest.mark.parametrize(
    "trainer, hows",
    [
        ("lightning", ("compiled", "recomputing")),
        ("transformers", ("compiled", "recomputing")),
        ("accelerate, after", ("compiled",)),
    ],
)
def test_compiled_and_with_activation_checkpointing_it_has_the_bits_of_an_eager_run(trainer, hows, tmp_path):
    """With FP32 weights, where casts make a difference."""

    def run(recipe, how=""):
        model, _ = TRAINERS[trainer].fit(recipe, tmp_path, how=how)
        hmpx.restore()
        return bits(model)

    plain = run(RECIPES["FP32 weights"])
    assert [run(RECIPES["FP32 weights"], how) for how in hows] == [plain] * len(hows) and plain != run(None)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_fresh_run_warns_of_nothing(trainer, tmp_path, caplog):
    """Neither hmpx nor torch; what a trainer says of itself is said without hmpx, too."""

    def said(recipe):
        caplog.clear()
        with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING):
            warnings.simplefilter("always")
            TRAINERS[trainer].fit(recipe, tmp_path)
        return {*(str(each.message) for each in caught), *caplog.messages}

    plain = said(None)
    for recipe in ("neuron-bf16-sr", {"weights": "master"}, {"weights": "master", "use_master_weights_in_ckpt": True}):
        assert said(recipe) <= plain
        hmpx.restore()


def test_the_loop_by_hand_moves_the_weights():
    assert bits(TRAINERS["lightning"].by_hand("stochastic")) != bits(net().bfloat16())
