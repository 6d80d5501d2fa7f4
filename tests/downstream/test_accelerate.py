"""`hmpx.prepare` before and after `accelerator.prepare`, beside a loop by hand; resumed beside unbroken."""

from __future__ import annotations

import logging

import accelerate
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hmpx
from tests.downstream.by_hand import AUTOCASTS, RECIPES, ByHand, adamw, batches, bits, net, state_bits

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


class Run:
    """A plain Accelerate loop, and where `hmpx.prepare` stands in it."""

    def __init__(self, recipe, when, **asked):
        accelerate.state.AcceleratorState._reset_state(True)
        self.accelerator = accelerate.Accelerator(cpu=True, **asked)
        model = net()
        optimizer = adamw(model.parameters())
        if when == "before":
            hmpx.prepare(model, optimizer, recipe)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if when == "after":
            got = hmpx.prepare(self.model, self.optimizer, recipe)
            assert got[0] is self.model and got[1] is self.optimizer

    def train(self, data, clip=0.0):
        for inputs, targets in data:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.cross_entropy(self.model(inputs), targets))
                if self.accelerator.sync_gradients and clip:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize(
    "when, way, accumulate, clip",
    [
        ("before", "stochastic", 1, 0.0),
        ("before", "master", 2, 0.1),
        ("after", "stochastic", 2, 0.1),
        ("after", "FP32 weights", 1, 0.0),
    ],
)
def test_a_run_has_the_bits_of_a_loop_by_hand(when, way, accumulate, clip):
    run = Run(RECIPES[way], when, gradient_accumulation_steps=accumulate).train(batches(), clip)
    hmpx.restore()
    clips = (lambda params: clip_grad_norm_(params, clip)) if clip else (lambda params: None)
    by_hand = ByHand(net(), way).train(batches(), accumulate=accumulate, clip=clips)
    assert bits(run.model) == bits(by_hand.model)


SPLIT = {**RECIPES["master"], "weights": "split"}


@pytest.mark.parametrize(
    "when, recipe",
    [("before", "torchao-bf16-sr"), ("before", SPLIT), ("after", RECIPES["master"]), ("after", RECIPES["stochastic"])],
    ids=str,
)
def test_a_resumed_run_has_the_bits_of_an_unbroken_one(when, recipe, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hmpx"):
        unbroken = Run(recipe, when).train(batches()[:4])
        unbroken.accelerator.save_state(str(tmp_path))
        unbroken.train(batches()[4:])
        resumed = Run(recipe, when)
        resumed.accelerator.load_state(str(tmp_path))
        resumed.train(batches()[4:])
    assert bits(unbroken.model) == bits(resumed.model)
    assert state_bits(unbroken.optimizer) == state_bits(resumed.optimizer)
    assert not [record for record in caplog.records if record.name == "hmpx"]


def test_an_accelerator_that_is_made_later_is_looked_at_when_it_takes_the_optimizer():
    model = net()
    optimizer = adamw(model.parameters())
    hmpx.prepare(model, optimizer, "hmp-o1")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    with pytest.raises(hmpx.HmpxError, match="mixed_precision='bf16'"):
        accelerator.prepare(model, optimizer)
    hmpx.restore()
    accelerator.prepare(net(), optimizer)  # no recipe is in force any more


def test_autocast_goes_with_a_recipe_that_leaves_ops_alone():
    """Then both make sense: BF16 weights with masters, and the ops as autocast has them."""
    run = Run({"opt_level": None, "weights": "master"}, "before", mixed_precision="bf16").train(batches())
    assert bits(run.model) == bits(ByHand(net(), "master").train(batches()).model)


def test_accelerate_clips_through_torch():
    """Gradients that are released can be clipped no more."""
    model = net().bfloat16()
    optimizer = adamw(model.parameters())
    hmpx.attach(optimizer, release_gradients=True)
    model(torch.ones(2, 16, dtype=BF16)).float().square().sum().backward()
    for clip in (accelerate.Accelerator(cpu=True).clip_grad_norm_, accelerate.Accelerator(cpu=True).clip_grad_value_):
        with pytest.raises(hmpx.HmpxError, match="release_gradients=False"):
            clip(model.parameters(), 1.0)
    optimizer.step()


def test_a_model_that_accelerate_compiles():
    eager = Run(RECIPES["FP32 weights"], "after").train(batches())
    hmpx.restore()
    compiled = Run(RECIPES["FP32 weights"], "after", dynamo_backend="aot_eager").train(batches())
    weights = {name.removeprefix("_orig_mod."): value for name, value in bits(compiled.model).items()}
    hmpx.restore()
    assert weights == bits(eager.model) != bits(Run(None, "never").train(batches()).model)


def test_a_module_is_named_as_before_inside_what_accelerate_made():
    run = Run({**AUTOCASTS, "module_dtypes": {"2": "float32"}}, "after", dynamo_backend="aot_eager")
    assert [p.dtype for p in run.model.parameters()] == [BF16] * 2 + [torch.float32] * 2 + [BF16] * 2


def test_a_fresh_run_warns_of_nothing(caplog):
    """Accelerate's optimizer loads its own state into itself when it is made: no masters are missed then."""
    with caplog.at_level(logging.WARNING):
        for when in ("before", "after"):
            Run({"weights": "master"}, when).train(batches())
    assert not caplog.messages
