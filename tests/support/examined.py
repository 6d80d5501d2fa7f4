"""Trains a model while `hmpx.doctor` looks at it."""

import torch

import hmpx


def trained(model, *optimizers, steps=12, loss_of=None, after=lambda: None):
    with hmpx.doctor() as found:
        for step in range(1, steps + 1):
            x = torch.randn(32, 16)
            loss = loss_of(model, x, step) if loss_of else model(x.to(model[0].weight.dtype)).float().square().mean()
            for each in optimizers:
                each.zero_grad()
            loss.backward()
            for each in optimizers:
                each.step()
            after()
    assert not [each for each in found.not_checked if "raised when it was looked at" in each], found.not_checked
    return found


def only(found, kind):
    (one,) = [each for each in found.findings if each.kind == kind]
    return one
