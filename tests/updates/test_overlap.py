"""Parameters that share elements in memory: both updates count, or an error says who they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.rounding import native
from hmpx.updates.stepping import batching
from hmpx.updates.stepping.fused_batch import FusedBatch
from hmpx.updates.stepping.names import overlaps
from tests.support.optimizers import UnlistedSGD

BF16 = torch.bfloat16


def views(buffer):
    """Cut one buffer in ways that do and do not overlap: name -> (parameters, how many share an element)."""
    rows, columns = buffer.view(8, 6), buffer.view(8, 6)
    return {
        "one weight twice": ([rows, rows], 2),
        "halves that meet": ([buffer[:24], buffer[24:]], 0),
        "halves that overlap by one": ([buffer[:25], buffer[24:]], 2),
        "columns of a matrix": ([columns[:, :2], columns[:, 2:4], columns[:, 4:]], 0),
        "columns that overlap": ([columns[:, :3], columns[:, 2:4], columns[:, 4:]], 2),
        "every second element, and the others": ([buffer[::2], buffer[1::2]], 0),
        "a row and its transpose": ([rows[:6], rows[:6].t()], 2),
        "three of which two are one": ([buffer[:10], buffer[20:30], buffer[:10].view(2, 5)], 2),
    }


KINDS = list(views(torch.zeros(48)))


def parameters(kind, dtype):
    buffer = torch.linspace(1, 2, 48, dtype=dtype)
    cut, sharing = views(buffer)[kind]
    params = [nn.Parameter(view) for view in cut]
    assert all(p.untyped_storage().data_ptr() == buffer.data_ptr() for p in params)
    return buffer, params, sharing


@pytest.mark.parametrize("kind", KINDS)
def test_shared_elements_are_found_and_all_updates_count_where_parameters_are_stepped_one_by_one(kind, monkeypatch):
    """As in plain torch on an FP32 buffer; the numbers are chosen so that every sum is exact in BF16."""
    _, params, sharing = parameters(kind, BF16)
    with torch.no_grad():
        found = overlaps(params)
    assert len(found) == sharing and all(found[other] is p for p, other in found.items())
    results = []
    for dtype, large in ((torch.float32, False), (BF16, False), (BF16, True)):
        if large:  # for slices
            monkeypatch.setattr(batching, "_FLOOR", 64)
            monkeypatch.setattr(batching, "_ALIGN", 1)
            monkeypatch.setattr(batching, "_PARTS", 8)
        buffer, params, _ = parameters(kind, dtype)
        with torch.no_grad():
            buffer.fill_(1.0)
        optimizer = optim.SGD(params, lr=0.125, foreach=False)
        if dtype is BF16:
            hmpx.attach(optimizer)
        for _ in range(3):
            for i, p in enumerate(params, 1):
                p.grad = torch.full_like(p, i)
            optimizer.step()
        results.append(buffer.float())
    assert torch.equal(*results[:2]) and torch.equal(*results[1:])


@pytest.mark.parametrize(
    "cls, weights", [(UnlistedSGD, "stochastic"), (optim.SGD, "master"), (optim.SGD, "split"), (UnlistedSGD, "master")]
)
def test_elsewhere_an_error_names_the_two(cls, weights):
    buffer, params, _ = parameters("columns that overlap", BF16)
    optimizer = cls(params, lr=0.25)
    hmpx.attach(optimizer, weights, names=[f"layer.{i}" for i in range(len(params))])
    before = buffer.clone()
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(hmpx.HmpxError, match=r"'layer\.\d' and 'layer\.\d' share memory"):
        optimizer.step()
    assert torch.equal(buffer, before)


def test_parameters_that_come_to_share_memory_later_are_found():
    p, q = (nn.Parameter(torch.ones(4, dtype=BF16)) for _ in range(2))
    optimizer = UnlistedSGD([p, q], lr=0.25)
    hmpx.attach(optimizer)
    p.grad = q.grad = torch.ones(4, dtype=BF16)
    optimizer.step()
    q.data = p.data
    with pytest.raises(hmpx.HmpxError, match="share memory"):
        optimizer.step()


@pytest.mark.parametrize("lay", ["shape", "strides"])
def test_parameters_that_come_to_share_memory_where_they_are_are_found(lay):
    """At the same address, but longer, or in rows where they were in columns."""
    buffer = torch.ones(48, dtype=BF16)
    p, q = (nn.Parameter(view) for view in (buffer.view(8, 6)[:, :3], buffer.view(8, 6)[:, 3:]))
    if lay == "shape":
        p.data = buffer.view(8, 6)[:2, :3]
    optimizer = UnlistedSGD([p, q], lr=0.25)
    hmpx.attach(optimizer)
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer.step()
        with torch.no_grad():
            assert not overlaps([p, q])
    p.data = buffer.view(8, 6)[:2, :4] if lay == "shape" else buffer[:24].view(8, 3)
    with torch.no_grad():
        assert set(overlaps([p, q])) == {p, q}
    p.grad = torch.ones_like(p)
    with pytest.raises(hmpx.HmpxError, match="share memory"):
        optimizer.step()


def on_threads(threads, fused, state_dtype, large=100_000):
    """A weight that is two parameters, after steps beside another one: more elements than one thread takes."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(1)
        one, other = (torch.randn(large, generator=generator).bfloat16() for _ in range(2))
        params = [nn.Parameter(one), nn.Parameter(one.view(-1, 1000)), nn.Parameter(other)]
        optimizer = optim.AdamW(list(zip("abc", params, strict=True)), lr=0.1)
        hmpx.attach(optimizer, fused=fused, state_dtype=state_dtype)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            optimizer.step()
    finally:
        torch.set_num_threads(before)
    return one


@pytest.mark.parametrize("state_dtype", [torch.float32, BF16, "8bit"])
def test_the_threads_of_a_kernel_do_not_race_for_shared_elements(state_dtype, monkeypatch):
    by_kernel = []
    step = FusedBatch.step

    def told(self, call, write_back, gradients):
        before = len(write_back.written)
        step(self, call, write_back, gradients)
        by_kernel.append(write_back.written[before:])

    monkeypatch.setattr(FusedBatch, "step", told)
    expected = on_threads(1, False, state_dtype)
    assert not by_kernel
    for threads in (1, 2):
        assert torch.equal(on_threads(threads, False, state_dtype), expected)
        assert torch.equal(on_threads(threads, True, state_dtype), expected)
    assert by_kernel == ([["c"]] * 6 if native.library() is not None else [])
