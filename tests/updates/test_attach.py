"""`attach`: masters and BF16 state of several optimizers, against loops written out here; gradients in FP32.

`test_whole_life.py` has every way to hold weights and state.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import hmpx
from tests.support.training import (
    masters_in,
    parameter,
    parameters,
    same,
    set_gradients,
    step_by,
    train,
    weights,
)

BF16 = torch.bfloat16


def test_attached_is_the_same_as_in_a_region(sliced):
    (named, optimizer), (twin, reference) = [(n, optim.AdamW(n, lr=1e-2)) for n in (parameters(), parameters())]
    hmpx.attach(optimizer, seed=5)
    for step in range(4):
        set_gradients(named, step)
        set_gradients(twin, step)
        optimizer.step()
        with hmpx.disable_casts(seed=5):
            reference.step()
    assert same(weights(named), weights(twin)) and optimizer.param_groups[0]["hmpx_seed"] == 5


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD, optim.Adafactor, optim.LBFGS])
def test_master_is_an_fp32_copy_of_the_parameters(cls, sliced):
    named, twin = parameters(), parameters(torch.float32)
    optimizer, reference = cls(named, lr=1e-2), cls(twin, lr=1e-2)
    hmpx.attach(optimizer, "master")
    for step in range(5):
        set_gradients(named, step)
        set_gradients(twin, step)
        closure = (lambda: torch.tensor(0.0),) if cls is optim.LBFGS else ()
        optimizer.step(*closure)
        reference.step(*closure)
        assert same(weights(named), [q.bfloat16() for q in weights(twin)])


@pytest.mark.parametrize("cls, options", [(optim.AdamW, {"foreach": False}), (optim.Adafactor, {}), (optim.LBFGS, {})])
def test_state_in_bf16_is_rounded_stochastically(cls, options, sliced):
    named, twin = parameters(), parameters(torch.float32)
    optimizer, reference = cls(named, lr=1e-2, **options), cls(twin, lr=1e-2, **options)
    hmpx.attach(optimizer, state_dtype=BF16)
    closure = (lambda: torch.tensor(0.0),) if cls is optim.LBFGS else ()
    for step in range(4):
        set_gradients(named, step)
        set_gradients(twin, step)
        optimizer.step(*closure)
        reference.step(*closure)
        with torch.no_grad():
            for name, q in twin:
                for key, value in reference.state[q].items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                        value.copy_(hmpx.stochastic_round(value, seed=0, step=step, name=f"{name}.{key}"))
                q.copy_(hmpx.stochastic_round(q, seed=0, step=step, name=name))
        for (_, p), (_, q) in zip(named, twin, strict=True):
            assert torch.equal(p.float(), q)
            for key, value in reference.state[q].items():
                held = optimizer.state[p][key]
                if isinstance(value, torch.Tensor) and value.dim() and value.is_floating_point():
                    assert held.dtype is BF16 and torch.equal(held.float(), value), key


def test_weights_that_somebody_writes_to_count_more_than_their_masters():
    named = parameters()
    optimizer = optim.SGD(named, lr=0.0)
    for way in ("master", "split"):
        hmpx.attach(optimizer, way)
        train(named, optimizer, 0, 1)
        named[0][1].data.fill_(0.5)  # .data leaves no trace in the version counter
        before = weights(named)
        train(named, optimizer, 1, 2)
        assert same(weights(named), before) and (named[0][1] == 0.5).all()
        hmpx.detach(optimizer)


@pytest.mark.parametrize("way", ["master", "split"])
def test_weights_written_by_hand_have_no_old_low_bits(way):
    p = parameter(10)
    optimizer = optim.SGD([p], lr=0.001)
    hmpx.attach(optimizer, way, use_master_weights_in_ckpt=True)
    step_by(optimizer)
    with torch.no_grad():
        p.fill_(4.0)
    step_by(optimizer, 0.0)
    saved = optimizer.state_dict()["state"].get(0, {}).get("hmpx_master", p.detach().float())
    assert (saved == 4).all()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.13 has no grad_dtype")
def test_gradients_accumulate_in_fp32(sliced):
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(11, generator=generator).bfloat16() * 1e-2 for _ in range(256)]
    named, twin = parameters(sizes=((11,),)), parameters(torch.float32, sizes=((11,),))
    optimizer, reference = optim.SGD(named, lr=1.0), optim.SGD(twin, lr=1.0)
    p, q = named[0][1], twin[0][1]
    p.grad = torch.zeros_like(p)  # a gradient from before is kept, wider
    handle = hmpx.attach(optimizer, "master", use_fp32_grad_acc=True)
    for batch in batches:
        (p * batch).sum().backward()
    q.grad = torch.stack([b.float() for b in batches]).cumsum(0)[-1]
    exact = torch.stack([b.double() for b in batches]).sum(0)
    assert p.grad.dtype is torch.float32 and ((p.grad - exact) / exact).abs().max() < 1e-5
    plain = torch.zeros(11, dtype=BF16)
    for batch in batches:
        plain += batch
    assert ((plain - exact) / exact).abs().max() > 0.02  # what BF16 would have made of it
    q.grad = p.grad.clone()
    kept = p.grad.clone()
    optimizer.step()
    reference.step()
    assert torch.equal(p, q.bfloat16()) and torch.equal(p.grad, kept)
    handle.detach()
    assert p.grad.dtype is BF16
    (p * batches[0]).sum().backward()


class RecentGradients(optim.Optimizer):
    """Steps by the last three gradients, which it keeps in a list."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            recent = self.state[p].setdefault("recent", [])
            recent.append(p.grad.clone())
            del recent[:-3]
            p.sub_(sum(recent), alpha=0.5)


def test_state_in_lists_that_was_cast_to_bf16_is_computed_with_in_fp32():
    """By hand: 1 + 2^-8 needs a bit more than BF16 has, so a sum of two of the list's in BF16 would be 1."""
    p = nn.Parameter(torch.zeros(3, dtype=BF16))
    optimizer = RecentGradients([("w", p)], {})
    for grad in (1.0, 2.0**-8, 0.0):
        hmpx.attach(optimizer, "master", state_dtype=BF16, use_master_weights_in_ckpt=True)
        p.grad = torch.full_like(p, grad)
        optimizer.step()
        last = masters_in(optimizer)[0]
        hmpx.detach(optimizer)
    assert torch.equal(last, torch.full((3,), -1.0 - 0.5 * (1 + 2.0**-8)))
