"""Released gradients that wait, so that their parameters step together; `test_programs.py` has the steps that break."""

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping.released import Released, Waiting
from tests.support.same import same

BF16 = torch.bfloat16
STEPS = 5


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)).to(BF16)


def _attached(model, release, **settings):
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
    return optimizer, hmpx.attach(optimizer, release_gradients=release, **settings)


def _backward(model, step):
    model(torch.full((3, 6), 1.0 + step, dtype=BF16)).float().square().sum().backward()


def _all(model, optimizer):
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [*(p.detach() for p in model.parameters()), *state]


@pytest.mark.parametrize("elements", [1, 40, 1 << 20], ids=["each alone", "some together", "all at the end"])
@pytest.mark.parametrize("settings", [{}, {"state_dtype": "8bit"}, {"weights": "split", "fused": True}], ids=str)
def test_parameters_that_step_together_have_the_bits_of_a_step_of_all(settings, elements, monkeypatch):
    monkeypatch.setattr(Waiting, "ELEMENTS", elements)
    found = []
    for release in (False, True):
        model = _net()
        optimizer, handle = _attached(model, release, **settings)
        for step in range(STEPS):
            _backward(model, step)
            if release:
                assert all(type(p.grad) is Released for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found.append(_all(model, optimizer))
        parts = len(handle._updates._parts)
    assert same(*found)
    assert parts == {1: 6, 40: 3, 1 << 20: 1}[elements]  # each is kept for the next step
