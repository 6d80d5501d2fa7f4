"""Norms of gradients beside an attached optimizer: FP64 of exact squares, whatever the ranks hold of them."""

import fractions
import math

import pytest
import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.utils import clip_grad_norm_, get_total_norm

import hmpx
from hmpx.updates import around_steps
from tests.support import ranks
from tests.support.sharded import Small, digest, fixed_gradients, shard

BF16, FP32 = torch.bfloat16, torch.float32


KEPT = []


@pytest.fixture(autouse=True)
def nothing_stays_attached():
    yield
    while KEPT:
        hmpx.detach(KEPT.pop())


def held(*gradients):
    """An attached optimizer of parameters with these gradients."""
    params = [nn.Parameter(torch.zeros_like(each)) for each in gradients]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    optimizer = optim.SGD(params, lr=0.1)
    hmpx.attach(optimizer)
    KEPT.append(optimizer)
    return optimizer


def drawn(*shapes, dtype=BF16):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def exact(gradients):
    """The nearest double, by fractions."""
    squares = sum(fractions.Fraction(x) ** 2 for each in gradients for x in each.flatten().tolist())
    return math.sqrt(squares)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_norm_is_the_exact_one_rounded_to_fp32(dtype, foreach, on_host, monkeypatch):
    monkeypatch.setattr(around_steps, "is_on_host", lambda tensor: on_host)
    gradients = drawn((40, 30), (7,), (), (0, 3), dtype=dtype)
    gradients.append(gradients[0].t())
    held(*gradients)
    found = get_total_norm((g for g in gradients), foreach=foreach)
    assert found.dtype is FP32
    assert found.item() == torch.tensor(exact(gradients), dtype=torch.float64).float().item()
    assert get_total_norm(gradients[0]).item() == torch.tensor(exact(gradients[:1]), dtype=torch.float64).float().item()


def test_without_an_attachment_and_for_other_norms_and_gradients_it_is_torchs():
    """Also beside an attached optimizer of other parameters."""
    gradients = drawn((40, 30), (7,))
    others = {"one": (gradients, 1.0), "largest": (gradients, math.inf), "wide": ([g.double() for g in gradients], 2.0)}
    before = {name: get_total_norm(*each) for name, each in others.items()}
    torchs = get_total_norm(gradients)
    optimizer = held(*gradients)
    after = {name: get_total_norm(*each) for name, each in others.items()}
    assert get_total_norm(gradients).dtype is FP32
    assert get_total_norm([each.clone() for each in gradients]).equal(torchs)  # of another model, perhaps
    assert get_total_norm([]) == 0
    hmpx.detach(optimizer)
    assert all(torch.equal(before[name], after[name]) and before[name].dtype is after[name].dtype for name in others)
    assert get_total_norm(gradients).dtype is torchs.dtype is BF16


def test_a_norm_that_is_not_finite_is_told_as_torch_tells_it():
    gradients = [*drawn((3,)), torch.tensor([math.inf], dtype=BF16), torch.tensor([math.nan], dtype=BF16)]
    held(*gradients)
    assert get_total_norm(gradients[:2]) == math.inf
    assert get_total_norm(gradients).isnan()
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        get_total_norm(gradients, error_if_nonfinite=True)


def test_gradients_are_scaled_as_torch_scales_them_by_that_norm():
    (gradient,) = drawn((40, 30))
    optimizer = held(gradient.clone())
    (p,) = optimizer.param_groups[0]["params"]
    norm = clip_grad_norm_(p, 0.5)
    assert norm.item() == torch.tensor(exact([gradient]), dtype=torch.float64).float().item()
    assert torch.equal(p.grad, gradient * (0.5 / (norm + 1e-6)))


def _trained(rank):
    model = shard(Small(), "plain")
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    hmpx.attach(optimizer, model=model, seed=0)
    norms = []
    for step in range(12):
        fixed_gradients(model, step)
        norm = clip_grad_norm_(model.parameters(), 0.1)
        assert isinstance(norm, DTensor)
        norms.append(norm.full_tensor().item())
        optimizer.step()
    return digest(dict(model.named_parameters())), norms


def test_clipped_weights_do_not_depend_on_the_number_of_ranks():
    found = [answer for world in (1, 2, 4) for answer in ranks.run(world, _trained)]
    assert all(each == found[0] for each in found)


def _placed(rank):
    whole = drawn((6, 5), (9,), (4, 4))
    mesh = init_device_mesh("cpu", (2, 2))
    places = [(Shard(0), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(1))]
    placed = [distribute_tensor(each, mesh, place) for each, place in zip(whole, places, strict=True)]
    part = DTensor.from_local(torch.full((3,), 0.25, dtype=BF16), mesh, (Partial(), Replicate()))
    held(*placed, *whole)
    return get_total_norm(placed).full_tensor().item(), get_total_norm(whole).item(), _full(get_total_norm([part]))


def _full(norm):
    return norm.full_tensor().item()


def test_each_element_counts_once_however_it_is_placed():
    for found, expected, partial in ranks.run(4, _placed):
        assert found == expected
        assert partial == pytest.approx(0.5 * 3**0.5, rel=0.01)  # torch's own, of sums over two ranks
