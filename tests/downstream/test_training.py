"""Real architectures under recipes: ten steps of AdamW on one batch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import hmpx
from tests.downstream.comparing import made
from tests.downstream.zoo import NO_KERNEL, ZOO, floating

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 10


def losses_of(model: nn.Module, inputs: dict) -> list[float]:
    """Fit the first output to noise. Dropout is off, so that two curves can be compared."""
    for module in model.eval().modules():
        module.train(isinstance(module, nn.modules.batchnorm._BatchNorm))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    target, losses = None, []
    for _ in range(STEPS):
        output = next(output for output in floating(model(**inputs)) if output.dim() > 1)
        if target is None:
            target = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
        loss = nn.functional.mse_loss(output.float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@functools.cache
def in_fp32(name: str) -> list[float]:
    return losses_of(*made(name))


MORE_RECIPES = ("lean", "hmp-o1", "neuron-bf16-fp32-params-copy")
RECIPES = ["neuron-bf16-sr", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_RECIPES)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_steps_follow_the_curve_of_fp32(recipe):
    """Each of the losses falls, and is never further from FP32's than 3 % of the first one."""
    # Models are made before: an architecture that computes its sizes with torch gets others under the default lists.
    models = {name: made(name) for name in ZOO}
    expected = {name: in_fp32(name) for name in ZOO}
    wrong = {}
    with hmpx.activate(recipe):
        for name in ZOO:
            if name in NO_KERNEL:
                with pytest.raises(RuntimeError, match=NO_KERNEL[name]):
                    losses_of(*models[name])
                continue
            losses = losses_of(*models[name])
            far = max(abs(a - b) for a, b in zip(losses, expected[name], strict=True))
            if not (far < 0.03 * expected[name][0] and losses[-1] < losses[0]):
                wrong[name] = losses, expected[name]
    assert not wrong, wrong


def test_transformers_adafactor_treats_each_parameter_by_itself():
    """Bit for bit that of one optimizer for each; so its gradients may be released in backward."""
    from transformers.optimization import Adafactor

    def stepped(sets):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))]
        optimizers = [Adafactor([params[i] for i in each]) for each in sets]
        for _ in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            for optimizer in optimizers:
                optimizer.step()
        return params

    assert all(map(torch.equal, stepped([[0, 1]]), stepped([[0], [1]])))
    model = nn.Linear(8, 8)
    hmpx.prepare(model, optimizer := Adafactor(model.parameters()), "lean8")
    before = model.weight.detach().clone()
    model(torch.randn(4, 8)).float().square().mean().backward()
    optimizer.step()
    hmpx.restore(optimizer)
    assert not torch.equal(model.weight, before)
