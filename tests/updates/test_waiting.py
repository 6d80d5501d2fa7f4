"""Released gradients that wait, so that their parameters step together: the bits of other steps, wherever it breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping.released import Released, Waiting
from tests.support.kept_steps import same

BF16 = torch.bfloat16
STEPS = 5


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)).to(BF16)


def _attached(model, release, **settings):
    optimizer = optim.AdamW(model.named_parameters(), lr=1e-2)
    return optimizer, hmpx.attach(optimizer, release_gradients=release, **settings)


def _backward(model, step, *, fails=False):
    """A backward pass; one that fails does so before it comes to the first layer."""
    hidden = model[0](torch.full((3, 6), 1.0 + step, dtype=BF16))
    if fails:
        hidden.register_hook(_fail)
    loss = model[1:](hidden).float().square().sum()
    if not fails:
        loss.backward()
        return
    with pytest.raises(RuntimeError, match="lack of memory"):
        loss.backward()


def _fail(gradient):
    raise RuntimeError("lack of memory")


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


@pytest.mark.parametrize("elements", [1, 40, 1 << 20], ids=["each alone", "some together", "all at the end"])
def test_after_a_backward_that_fails_the_step_takes_those_that_wait(elements, monkeypatch):
    """The first layer has no gradients, and does not step."""
    monkeypatch.setattr(Waiting, "ELEMENTS", elements)
    found = []
    for release in (False, True):
        model = _net()
        optimizer, _ = _attached(model, release)
        for step in range(STEPS):
            _backward(model, step, fails=step == 2)
            optimizer.step()
            optimizer.zero_grad()
        found.append(_all(model, optimizer))
    assert same(*found)


def test_what_waits_is_given_back_by_detach():
    model, twin = _net(), _net()
    optimizer, handle = _attached(model, True)
    before = [p.detach().clone() for p in model.parameters()]
    _backward(model, 0, fails=True)
    with pytest.raises(hmpx.HmpxError, match="this gradient is gone"):
        optimizer.zero_grad()
    handle.detach()
    _backward(twin, 0, fails=True)
    assert same(before, [p.detach() for p in model.parameters()])  # nothing has stepped
    assert model[0].weight.grad is None
    assert same([p.grad for p in model[1:].parameters()], [p.grad for p in twin[1:].parameters()])


def test_a_load_drops_what_waits():
    model, twin = _net(), _net()
    optimizer, _ = _attached(model, True)
    _backward(model, 0)
    optimizer.step()
    saved, weights = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
    _backward(model, 1, fails=True)
    optimizer.load_state_dict(saved)
    model.load_state_dict(weights)
    assert all(p.grad is None for p in model.parameters())
    _backward(model, 1)
    optimizer.step()
    other, _ = _attached(twin, False)
    for step in range(2):
        other.zero_grad()
        _backward(twin, step)
        other.step()
    assert same(_all(model, optimizer), _all(twin, other))
