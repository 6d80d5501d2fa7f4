"""Steps by a formula where no kernel takes the parameters as they are held: the bits of the kernels in C."""

import contextlib
import logging
from itertools import cycle
from unittest import mock

import pytest
import torch
from torch import nn, optim

import hmpx
from hmpx.rounding import native
from hmpx.updates.stepping import fused_batch, transfers
from tests.support.formulas import CONFIGURATIONS
from tests.support.kernel_steps import same

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = ((63, 5), (4001,), (), (4, 128), (9, 300), (6, 2, 77), (5, 304), (3, 4, 3, 16), (40, 64))
WAYS = [
    ("stochastic", FP32),
    ("nearest", BF16),
    ("master", "8bit"),
    ("split", "fp8"),
    ("split8", "4bit"),
    ("master", FP32),
    ("stochastic", "8bit"),
    ("split8", FP32),
]
ROADS = ("torch", "torch, in parts", "torch, transposed", "C, transposed")
pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so the kernels do not run")


def trained(name, weights, state_dtype, road="C", change=lambda step, optimizer: None):
    """Four steps; all that the optimizer holds then, by parameter and key."""
    cls, options = CONFIGURATIONS[name]
    generator = torch.Generator().manual_seed(0)
    with contextlib.ExitStack() as patches:
        if road.startswith("torch"):
            patches.enter_context(mock.patch.object(native, "can_read", lambda *tensors: False))
        if road.endswith("in parts"):
            patches.enter_context(mock.patch.object(transfers, "_FLOOR", 1024))
        params = []
        for i, shape in enumerate(SHAPES):
            x = torch.randn(shape, generator=generator).bfloat16()
            if road.endswith("transposed") and x.dim() > 1:
                x = x.transpose(0, -1).contiguous().transpose(0, -1)
            params.append((f"p{i}", nn.Parameter(x)))
        optimizer = cls(params, **{"lr": 1e-2, **options})
        hmpx.attach(optimizer, weights, state_dtype=state_dtype, fused=True)
        for step in range(4):
            for _, p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            change(step, optimizer)
            optimizer.step()
    held = {(key, ""): p.detach() for key, p in params}
    for key, p in params:
        held |= {(key, k): v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor)}
    return held


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert same(value.contiguous(), other[key].contiguous()), key


@pytest.mark.filterwarnings("ignore:.*centered")
@pytest.mark.parametrize(
    "name, way",
    [*zip(CONFIGURATIONS, cycle(WAYS)), *(("AdamW", way) for way in WAYS), *(("NAdam", way) for way in WAYS[:4])],
)
def test_the_bits_are_those_of_the_kernels(name, way):
    expected = trained(name, *way)
    for road in ROADS:
        assert_same(trained(name, *way, road), expected)


@pytest.mark.parametrize("road", ROADS)
def test_options_that_change_are_seen(road):
    def change(step, optimizer):
        optimizer.param_groups[0].update(lr=1e-2 / (step + 1), weight_decay=0.1 * step, maximize=step == 2)

    assert_same(trained("AdamW", "split", FP32, road, change), trained("AdamW", "split", FP32, "C", change))


@pytest.mark.parametrize("kernels", [True, False])
def test_what_the_formula_does_not_take_gets_the_optimizers_own_step(kernels, monkeypatch):
    """A group with amsgrad, and FP32 parameters; groups choose for themselves, also where nobody says `fused`."""
    if not kernels:
        monkeypatch.setattr(native, "can_read", lambda *tensors: False)
    both = []
    for fused in (None if kernels else True, False):
        torch.manual_seed(0)
        taken, amsgrad, plain = (nn.Parameter(torch.randn(50).to(dtype)) for dtype in (BF16, BF16, FP32))
        groups = [{"params": [taken, plain]}, {"params": [amsgrad], "amsgrad": True}]
        optimizer = optim.AdamW(groups, lr=1e-2)
        hmpx.attach(optimizer, "split", fused=fused, names=["taken", "plain", "amsgrad"])
        for _ in range(3):
            for p in (taken, amsgrad, plain):
                p.grad = torch.randn(p.shape).to(p.dtype)
            optimizer.step()
        assert "max_exp_avg_sq" in optimizer.state[amsgrad] and "max_exp_avg_sq" not in optimizer.state[taken]
        both.append((taken, amsgrad, plain, optimizer.state[taken]["exp_avg_sq"]))
    (taken, *others, moment), (own, *own_others, own_moment) = both
    assert all(map(torch.equal, others, own_others))
    assert torch.allclose(moment, own_moment, rtol=1e-6, atol=0) and torch.allclose(taken, own, rtol=2**-7)


def test_a_device_without_kernels_is_told_of_once(caplog):
    fused_batch._warn_of_slow_steps.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hmpx"):
        for _ in range(2):
            fused_batch._warn_of_slow_steps("mps")
    (told,) = caplog.messages
    assert "no kernel for steps on mps" in told and "about 20 times" in told and "fused=False" in told
