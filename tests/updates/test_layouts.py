"""Weights, gradients and state in every memory layout, beside the same optimizer on FP32 copies of that layout.

torch's fused kernels walk weight, gradient and state as flat arrays, whatever their strides are. The FP32 copies have
the layout of their parameter and gradients in it, because torch itself goes wrong where they differ.
"""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from torch import nn

import hmpx
from hmpx.updates.stepping import batching
from tests.support.numbers import away
from tests.support.optimizers import CONFIGURATIONS, UnlistedAdamW, forms

pytestmark = pytest.mark.usefixtures("own_step")
WAYS = ("stochastic", "nearest", "master", "split", "region")


def _contiguous(shape):
    return torch.randn(shape)


def _expanded(shape):
    return torch.randn(shape[0], *(1 for _ in shape[1:])).expand(shape)


def _reversed(shape):
    return torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))


def _every_other(shape):
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2]


def _last(shape):
    return torch.randn(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


# name: shape, layout of the weight, layout of the gradient
LAYOUTS = {
    "contiguous": ((18, 20), _contiguous, _contiguous),
    "channels_last": ((6, 4, 5, 3), _last, _last),
    "channels_last_3d": ((3, 4, 2, 3, 5), _last, _last),
    "transposed": ((18, 20), _reversed, _reversed),
    "reversed": ((7, 5, 11), _reversed, _reversed),
    "sliced": ((18, 20), _every_other, _every_other),
    "expanded gradient": ((18, 20), _contiguous, _expanded),
    "transposed, expanded gradient": ((18, 20), _reversed, _expanded),
    "channels_last, contiguous gradient": ((6, 4, 5, 3), _last, _contiguous),
    "contiguous, channels_last gradient": ((6, 4, 5, 3), _contiguous, _last),
    "sliced, transposed gradient": ((18, 20), _every_other, _reversed),
    "contiguous, sliced gradient": ((18, 20), _contiguous, _every_other),
}
# Sums over neighbours, in a step that sees whole parameters, have the layout of the gradient in their last bits.
ACROSS = {"Adafactor", "Muon"}


def _as(tensor, like):
    """In the layout that `torch.empty_like(like)` has."""
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _bf16(x):
    """In its own layout, which `.bfloat16()` keeps only where it is dense."""
    size = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.as_strided((size,), (1,)).bfloat16().as_strided(x.shape, x.stride())


def check(name, form, layout, way):
    cls, options = CONFIGURATIONS[name]
    shape, weight, gradient = LAYOUTS[layout]
    shapes = (shape, tuple(max(n // 2, 1) for n in shape))
    torch.manual_seed(0)
    params = [nn.Parameter(_bf16(weight(s))) for s in shapes]
    copies = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, reference = (cls(ps, **copy.deepcopy(options), **form) for ps in (params, copies))
    if way != "region":
        hmpx.attach(optimizer, way)
    for step in range(3 if form.get("fused") else 2):
        for p, q in zip(params, copies, strict=True):
            p.grad = _bf16(gradient(p.shape))
            q.grad = p.grad.float() if name in ACROSS else _as(p.grad.float(), q)
        with hmpx.disable_casts() if way == "region" else contextlib.nullcontext():
            optimizer.step()
        reference.step()
        for i, (p, q) in enumerate(zip(params, copies, strict=True)):
            exact = q.detach().clone()
            if way in ("stochastic", "region"):
                rounded = hmpx.stochastic_round(exact, seed=0, step=step, name=str(i))
            else:
                rounded = away(exact) if way == "split" else exact.bfloat16()
            assert torch.equal(p, rounded), (name, form, layout, way, step)
            if way in ("stochastic", "region", "nearest"):
                q.data.copy_(rounded)
            state, expected = optimizer.state[p], reference.state[q]
            assert state.keys() == expected.keys()
            for key, value in expected.items():
                same = torch.equal(state[key], value) if isinstance(value, torch.Tensor) else state[key] == value
                assert same, (name, form, layout, way, step, key)
                if step == 0 and form.get("fused") and isinstance(value, torch.Tensor):
                    state[key] = state[key].contiguous()  # as of a checkpoint from before a change of layout


@pytest.mark.parametrize("floor", [128, 1 << 17])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_optimizer_in_any_layout_bit_for_bit(layout, floor, monkeypatch):
    """Every optimizer in every form. The ways to hold weights take turns; in the contiguous layout, each meets all."""
    monkeypatch.setattr(batching, "_FLOOR", floor)
    turns = itertools.islice(itertools.cycle(WAYS), list(LAYOUTS).index(layout) + (floor == 128), None)
    for name, form in forms():
        if name != "Muon" or len(LAYOUTS[layout][0]) == 2:
            for way in WAYS if layout == "contiguous" else [next(turns)]:
                check(name, form, layout, way)


def test_a_fused_kernel_of_a_class_that_hmpx_does_not_know_gets_one_layout():
    """Such a class steps on whole copies, and its kernel walks all of them as flat arrays all the same."""

    torch.manual_seed(0)
    weight, gradient = torch.randn(6, 4, 5, 3).bfloat16(), torch.randn(6, 4, 5, 3).bfloat16()
    p = nn.Parameter(weight.to(memory_format=torch.channels_last))
    q = nn.Parameter(weight.float())
    optimizer, reference = (UnlistedAdamW([("w", each)], lr=0.1, fused=True) for each in (p, q))
    p.grad, q.grad = gradient, gradient.float()
    with hmpx.disable_casts():
        optimizer.step()
    reference.step()
    assert torch.equal(p, hmpx.stochastic_round(q.detach(), seed=0, step=0, name="w"))
