"""How much memory a step takes beside weights, gradients and state."""

from itertools import cycle

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.updates.stepping import transfers
from hmpx.updates.stepping.optimizer_classes import SCOPES, formula_of
from tests.support.bench import memory
from tests.support.training import needs_grad_dtype

BF16 = torch.bfloat16
COUNT = 8_000_000
BY_ELEMENT = [cls for cls, reach in SCOPES.items() if reach == "element"]


def prepared(cls, shapes, **options):
    params = [nn.Parameter(torch.ones(shape, dtype=BF16)) for shape in shapes]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, cls(params, **options)


@pytest.mark.parametrize("cls, foreach", [*zip(BY_ELEMENT, cycle([False, True])), (optim.AdamW, None)])
def test_a_step_by_element_takes_at_most_copies_of_the_largest_parameter(cls, foreach):
    """FP32 weights and gradients, and up to three temporaries of torch's own; kernels need none of them."""
    made, most = [], 0.5 * COUNT if formula_of(cls([nn.Parameter(torch.ones(1))])) else 20 * 4_000_000

    def first():
        made.append(cls(params, foreach=foreach))
        hmpx.attach(made[0])
        made[0].step()

    params, _ = prepared(cls, [(2000, 1500), (4_000_000,), (1000, 1000)])
    for step in (first, *[lambda: made[0].step()] * 2):  # the third takes the plan of the second
        peak, stays = memory(step, torch.device("cpu"))
        assert peak - stays <= most


@needs_grad_dtype
def test_gradients_that_are_fp32_already_are_not_copied():
    """The buffers of a step hold FP32 weights and gradients of a slice: without the latter, half of them."""
    peaks = []
    for dtype in (BF16, torch.float32):
        params, optimizer = prepared(optim.AdamW, [(2000, 2000)], fused=True)
        hmpx.attach(optimizer, use_fp32_grad_acc=dtype is torch.float32)
        params[0].grad = torch.ones(2000, 2000, dtype=dtype)
        optimizer.step()
        before = params[0].grad
        peaks.append(memory(optimizer.step, torch.device("cpu"))[0])
        assert params[0].grad is before and (before == 1).all()
    assert peaks[1] == pytest.approx(peaks[0] / 2, rel=0.02)


def test_a_step_by_parameter_takes_copies_of_one():
    _, optimizer = prepared(optim.Adafactor, [(500, 400)] * 40)
    hmpx.attach(optimizer)
    peak, stays = memory(optimizer.step, torch.device("cpu"))
    assert (peak - stays) / (40 * 200_000) <= 0.5


@pytest.mark.parametrize("cls", [optim.Adam, optim.SGD])
def test_channels_last_parameters_take_copies_of_one(cls, monkeypatch):
    torch.manual_seed(1)
    weight = torch.randn(64, 32, 3, 3).bfloat16()
    layouts = (weight.clone(memory_format=torch.channels_last), weight.clone())
    monkeypatch.setattr(transfers, "_FLOOR", 1 << 12)
    params = [[nn.Parameter(w.clone()) for _ in range(4)] for w in layouts]
    optimizers = [cls(some, lr=0.1) for some in params]
    for optimizer, some in zip(optimizers, params, strict=True):
        hmpx.attach(optimizer)
        for p in some:
            p.grad = torch.ones_like(p)
        optimizer.step()
        peak, stays = memory(optimizer.step, torch.device("cpu"))
        assert (peak - stays) / some[0].numel() <= 16  # FP32 weight and gradient, and what rounds them
    assert torch.equal(params[0][0], params[1][0]) and not params[0][0].is_contiguous()
