"""Parameters that share elements in memory: an error says who they are."""

import pytest
import torch
from torch import nn, optim

import hmpx
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
def test_an_error_names_two_that_share_an_element_and_others_step(kind):
    buffer, params, sharing = parameters(kind, BF16)
    optimizer, before = optim.SGD(params, lr=0.25), buffer.clone()
    names = [f"layer.{i}" for i in range(len(params))]
    for p in params:
        p.grad = torch.ones_like(p)
    if sharing:
        with pytest.raises(hmpx.HmpxError, match=r"'layer\.\d' and 'layer\.\d' share memory"):
            hmpx.attach(optimizer, names=names)
        assert torch.equal(buffer, before)
    else:
        hmpx.attach(optimizer, "nearest", names=names)
        optimizer.step()
        assert torch.equal(torch.cat([p.flatten() for p in params]).sort()[0], (before - 0.25).sort()[0])


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
    p.data = buffer.view(8, 6)[:2, :4] if lay == "shape" else buffer[:24].view(8, 3)
    p.grad = torch.ones_like(p)
    with pytest.raises(hmpx.HmpxError, match="share memory"):
        optimizer.step()
