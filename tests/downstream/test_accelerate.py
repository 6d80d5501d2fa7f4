"""`hmpx.prepare` before and after `accelerator.prepare`: what Accelerate alone has; `test_trainers` has the rest."""

import pytest
import torch

from tests.downstream.by_hand import AUTOCASTS, batches, bits
from tests.downstream.trainers import Accelerate

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


def test_autocast_goes_with_a_recipe_that_leaves_ops_alone():
    """Then both make sense: BF16 weights with masters, and the ops as autocast has them."""
    by_accelerate = Accelerate("before").made({"opt_level": None, "weights": "master"}, mixed_precision="bf16")
    model, _ = by_accelerate.train(batches())
    assert bits(model) == bits(by_accelerate.by_hand("master"))


def test_a_module_is_named_as_before_inside_what_accelerate_made():
    run = Accelerate("after").made({**AUTOCASTS, "parameters": {"2.*": "float32"}}, dynamo_backend="aot_eager")
    assert [p.dtype for p in run.model.parameters()] == [BF16] * 2 + [torch.float32] * 2 + [BF16] * 2
