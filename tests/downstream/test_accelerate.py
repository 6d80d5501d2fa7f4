"""`hmpx.prepare` before and after `accelerator.prepare`: what Accelerate alone has; `test_trainers` has the rest."""

import accelerate
import pytest
import torch

import hmpx
from tests.downstream.by_hand import AUTOCASTS, adamw, batches, bits, net
from tests.downstream.trainers import Accelerate

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


def test_autocast_goes_with_a_recipe_that_leaves_ops_alone():
    """Then both make sense: BF16 weights with masters, and the ops as autocast has them."""
    by_accelerate = Accelerate("before").made({"opt_level": None, "weights": "master"}, mixed_precision="bf16")
    model, _ = by_accelerate.train(batches())
    assert bits(model) == bits(by_accelerate.by_hand("master"))


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


def test_a_module_is_named_as_before_inside_what_accelerate_made():
    run = Accelerate("after").made({**AUTOCASTS, "parameters": {"2.*": "float32"}}, dynamo_backend="aot_eager")
    assert [p.dtype for p in run.model.parameters()] == [BF16] * 2 + [torch.float32] * 2 + [BF16] * 2
