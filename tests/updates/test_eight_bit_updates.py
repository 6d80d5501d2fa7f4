"""State in 8 bits where gradients differ in size within a block: updates stay as large as with FP32 state."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import hmpx

BF16 = torch.bfloat16


def one_large():
    return torch.full((4, 128), 1e-3).index_fill_(1, torch.tensor([5]), 1.0)


def lognormal(sigma):
    return torch.exp(sigma * torch.randn(16, 128, generator=torch.Generator().manual_seed(0)))


def largest_update(cls, options, sizes, **settings):
    """Of an element in one step, in units of the learning rate."""
    p = nn.Parameter(torch.zeros(sizes.shape, dtype=BF16))
    optimizer = cls([("p", p)], lr=1e-3, **options)
    hmpx.attach(optimizer, **settings)
    generator, before, found = torch.Generator().manual_seed(1), torch.zeros(sizes.shape), 0.0
    for _ in range(120):
        p.grad = (torch.randn(sizes.shape, generator=generator) * sizes).bfloat16()
        optimizer.step()
        after = p.detach().float()
        found, before = max(found, (after - before).abs().max().item()), after
    return found / 1e-3


@pytest.mark.parametrize(
    "cls, options, sizes",
    [
        (optim.AdamW, {"weight_decay": 0.0}, one_large()),
        (optim.Adam, {"amsgrad": True}, lognormal(1.0)),
        (optim.NAdam, {}, lognormal(1.5)),
    ],
)
def test_no_update_is_twice_the_largest_one_of_fp32_state(cls, options, sizes):
    case = cls, options, sizes
    reference = largest_update(*case, weights="split")
    assert largest_update(*case, weights="split", state_dtype="8bit") <= 2 * reference
    assert largest_update(*case, fused=True, state_dtype="8bit") <= 2 * reference


def test_a_root_of_a_difference_is_warned_of(caplog):
    for options, warned in (({"centered": True}, 1), ({}, 0)):
        caplog.clear()
        optimizer = optim.RMSprop([nn.Parameter(torch.ones(4, 128, dtype=torch.bfloat16))], **options)
        hmpx.attach(optimizer, state_dtype="8bit")
        assert caplog.text.count("RMSprop(centered=True) takes the root of a difference") == warned
