"""`split` judges by value: writes that leave a weight as it was leave its lower half, whoever makes them and how."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping import batching
from tests.support.training import masters_in, parameters, set_gradients

BF16 = torch.bfloat16
SIZES = ((8, 6), (64, 32, 3, 3), (11,), (70, 61))  # of which the second and the fourth have blocks


def pair(make=lambda named, dtype: named, way="split", **options):
    """Parameters with FP32 copies of them, and an optimizer for each."""
    both = []
    for dtype in (BF16, torch.float32):
        named = make(parameters(dtype, SIZES), dtype)
        both.append((named, optim.AdamW(named, lr=1e-2, **options)))
    hmpx.attach(both[0][1], way, use_master_weights_in_ckpt=way == "split", fused=False)
    return both


def step(both, number):
    for named, optimizer in both:
        set_gradients(named, number)
        optimizer.step()


def assert_copies(both):
    (_, optimizer), (copies, _) = both
    for i, (masters, (_, q)) in enumerate(zip(masters_in(optimizer), copies, strict=True)):
        assert torch.equal(masters, q.detach()), i


def clamped(named, optimizer):
    for _, p in named:
        p.clamp_(-1e4, 1e4)


def loaded(named, optimizer):
    held = nn.ParameterList(p for _, p in named)
    held.load_state_dict(copy.deepcopy(held.state_dict()))


def averages_put_in_and_out(named, optimizer):
    kept = [p.clone() for _, p in named]
    for _, p in named:
        p.copy_(torch.full_like(p, 0.125))
    for (_, p), weight in zip(named, kept, strict=True):
        p.copy_(weight)


def exchanged(named, optimizer):
    for _, p in named:
        p.data = p.data.clone()


def laid_out_otherwise(named, optimizer):
    for _, p in named:
        if p.dim() == 4:
            last = p.is_contiguous(memory_format=torch.channels_last)
            p.data = p.data.contiguous(memory_format=torch.contiguous_format if last else torch.channels_last)


def transposed(named, optimizer):
    for _, p in named:
        if p.dim() == 2:
            p.data = p.data.t().contiguous().t() if p.is_contiguous() else p.data.contiguous()


def cast_to_and_fro(named, optimizer):
    for _, p in named:
        p.data = p.data.float()
        p.data = p.data.bfloat16()


def put_into_a_flat_buffer(named, optimizer):
    flat = torch.cat([p.reshape(-1) for _, p in named])
    for (_, p), part in zip(named, flat.split([p.numel() for _, p in named]), strict=True):
        p.data = part.view(p.shape)


def saved_and_loaded(named, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


WRITES = [
    *(clamped, loaded, averages_put_in_and_out, exchanged, laid_out_otherwise, transposed, cast_to_and_fro),
    *(put_into_a_flat_buffer, saved_and_loaded),
]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
@pytest.mark.parametrize("foreach, floor", [(False, 64), (True, 1 << 17)], ids=["slices", "whole"])
def test_a_write_that_changes_no_value_loses_nothing(write, foreach, floor, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", floor)
    both = pair(foreach=foreach)
    for number in range(4):
        step(both, number)
        with torch.no_grad():
            write(*both[0])
        assert_copies(both)


def by_rests(weights, before, copies):
    """NumPy's account of what is followed: a weight that was written keeps the rest that the one before it had."""
    now, old, new = (np.ascontiguousarray(t.detach().float().numpy()).view(np.int32) for t in (weights, before, copies))
    rest = new - old
    rest[(now << 1 == 0) & (rest < 0) | np.isinf(now.view(np.float32)) & (rest > 0)] = 0
    return torch.from_numpy((now + rest).view(np.float32))


def some_clamped(p):
    p.clamp_(-1.0, 1.5)


def a_row(p):
    p[len(p) // 2] = 0.75


def through_data(p):
    p.data[-1:] *= 2


def negated(p):
    p.neg_()


def everything(p):
    p.fill_(0.25)


def one(p):
    p.view(-1)[p.numel() // 3] = 3.0


def zeros_and_infs(p):
    p[::2], p[1::3] = 0.0, -torch.inf


@pytest.mark.parametrize("write", [some_clamped, a_row, through_data, negated, everything, one, zeros_and_infs])
def test_what_is_written_by_hand_counts_and_keeps_the_rest_of_what_it_replaces(write, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", 64)
    both = pair()
    (named, _), (copies, _) = both
    for number in range(3):
        step(both, number)
        before = [p.detach().clone() for _, p in named]
        with torch.no_grad():
            for (_, p), old, (_, q) in zip(named, before, copies, strict=True):
                write(p)
                q.copy_(by_rests(p, old, q))
        assert_copies(both)
