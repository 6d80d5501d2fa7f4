"""`split` judges by value: writes that leave a weight as it was leave its lower half, whoever makes them and how."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.rounding import native
from hmpx.updates.holding.checksums import BLOCK, SMALL, checksums
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
    hmpx.attach(both[0][1], way, use_master_weights_in_ckpt=way == "split")
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


def by_blocks(weights, before, copies):
    """NumPy's account of what is followed: where a block of weights is another than before, its weights count."""
    flat, old, new = (t.detach().reshape(-1).float().numpy() for t in (weights, before, copies))
    block = 1 if flat.size <= SMALL else BLOCK
    for start in range(0, flat.size, block):
        part = slice(start, start + block)
        if (flat[part].view(np.int32) != old[part].view(np.int32)).any():
            new[part] = flat[part]
    return torch.from_numpy(new).view(weights.shape)


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


@pytest.mark.parametrize("write", [some_clamped, a_row, through_data, negated, everything, one])
def test_what_is_written_by_hand_counts_in_its_block_alone(write, monkeypatch):
    monkeypatch.setattr(batching, "_FLOOR", 64)
    both = pair()
    (named, _), (copies, _) = both
    for number in range(3):
        step(both, number)
        before = [p.detach().clone() for _, p in named]
        with torch.no_grad():
            for (_, p), old, (_, q) in zip(named, before, copies, strict=True):
                write(p)
                q.copy_(by_blocks(p, old, q))
        assert_copies(both)


# The checksums themselves


def in_numpy(weights, multipliers):
    bits = weights.contiguous().view(torch.int16).reshape(-1).numpy().astype(np.uint16).astype(np.uint64)
    bits = np.pad(bits, (0, -bits.size % BLOCK)).reshape(-1, BLOCK)
    return ((bits * multipliers).sum(1) % 2**32 >> 16).astype(np.uint16).astype(np.int16)


def multipliers():
    """The constants of the definition, recomputed with NumPy's own wraparound."""
    h = (np.arange(1, BLOCK + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)).astype(np.uint32)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x21F0AAAD)
    h = (h ^ h >> np.uint32(15)) * np.uint32(0x735A2D97)
    return ((h ^ h >> np.uint32(15)) | np.uint32(1)).astype(np.uint64)


@pytest.mark.parametrize("shape", [(5000,), (1, 4097), (41, 103), (64, 32, 3, 3)])
@pytest.mark.parametrize("kernel", ["C", "eager"])
def test_checksums_are_what_their_definition_says_in_any_layout(shape, kernel, monkeypatch):
    if kernel == "eager":
        monkeypatch.setattr(native, "library", lambda: None)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = in_numpy(x, multipliers())
    assert np.array_equal(checksums(x).numpy(), expected)
    for order in ((*range(1, x.dim()), 0), tuple(reversed(range(x.dim())))):
        back = tuple(np.argsort(order))
        assert np.array_equal(checksums(x.permute(order).contiguous().permute(back)).numpy(), expected)


@pytest.mark.parametrize("shape", [(41, 7, 103), (128, 7, 9), (9, 7, 128)])
def test_checksums_do_not_depend_on_the_parts_that_they_are_worked_out_in(shape, monkeypatch):
    """Of tensors that are laid out in another way, a part is some rows; blocks lie across them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = in_numpy(x, multipliers())
    for chunk in (BLOCK, 5000):
        monkeypatch.setattr("hmpx.updates.holding.checksums._CHUNK", chunk)
        for order in itertools.permutations(range(3)):
            back = tuple(np.argsort(order))
            laid_out = x.permute(order).contiguous().permute(back)
            assert np.array_equal(checksums(laid_out).numpy(), expected), (chunk, order)


CHANGES = {
    "sign": lambda bits: bits ^ 0x8000,
    "twice": lambda bits: bits + 0x80,
    "half": lambda bits: bits - 0x80,
    "next": lambda bits: bits + 1,
    "last bit": lambda bits: bits ^ 1,
    "zero": lambda bits: bits * 0,
    "rolled": lambda bits: bits.roll(1),
    "blocks turned": lambda bits: bits.view(-1, BLOCK).flip(1).reshape(-1),
    "blocks moved": lambda bits: bits.roll(BLOCK),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_with_a_pattern_are_seen(change):
    """Two blocks of other values agree by chance once in 65536 times: 1 is expected here, at most 6 are allowed."""
    weights = (torch.randn(BLOCK * 65536, generator=torch.Generator().manual_seed(2)) * 0.02).bfloat16()
    bits = weights.view(torch.int16).to(torch.int32)
    changed = CHANGES[change](bits).to(torch.int16).view(BF16)
    differ = (changed.view(torch.int16) != weights.view(torch.int16)).view(-1, BLOCK).any(1)
    assert differ.sum() > 0.99 * len(differ)
    assert int(((checksums(changed) == checksums(weights)) & differ).sum()) <= 6
