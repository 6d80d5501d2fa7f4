"""Tensors without data: `FakeTensorMode` and the meta device tell a run's dtypes and sizes before it is paid for."""

from __future__ import annotations

import contextlib
from itertools import cycle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hmpx

BF16 = torch.bfloat16
PLACES = {"FakeTensorMode": FakeTensorMode, "meta": lambda: torch.device("meta")}
WAYS = ("stochastic", "nearest", "master", "split", "split8")


def model(dtype):
    return nn.Sequential(nn.Linear(130, 40, dtype=dtype), nn.LayerNorm(40, dtype=dtype), nn.Linear(40, 2, dtype=dtype))


def described(state):
    """Dtypes and shapes of everything that an optimizer's checkpoint holds."""
    return {
        (name, key): (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)
        for name, held in state.items()
        for key, value in held.items()
    }


def trained(place, fused=False, **how):
    with place():
        it = model(BF16)
        optimizer = torch.optim.AdamW(it.named_parameters(), lr=1e-2, fused=fused)
        hmpx.attach(optimizer, **how)
        for _ in range(2):
            for p in it.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert {p.dtype for p in it.parameters()} == {BF16}
        return described(optimizer.state_dict()["state"])


@pytest.mark.parametrize("kernels", ["native", "float32"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_model_without_data_has_the_dtypes_of_one_with_data(place, kernels):
    def run(here):
        with here(), hmpx.convert(kernels=kernels):
            it = model(torch.float32)
            out = it(torch.randn(3, 130))
            loss = nn.functional.cross_entropy(out, torch.zeros(3, dtype=torch.long))
            loss.backward()
            with torch.no_grad(), hmpx.cached_weights():
                kept = it(torch.randn(3, 130)).dtype
            return out.dtype, loss.dtype, kept, [p.grad.dtype for p in it.parameters()]

    found = run(place)
    assert found == run(contextlib.nullcontext) and found[:3] == (BF16, torch.float32, BF16)


@pytest.mark.parametrize(
    "weights, how", list(zip(WAYS, cycle([{}, {"state_dtype": BF16}, {"state_dtype": "8bit"}]))), ids=str
)
def test_a_step_without_data_leaves_the_state_of_one_with_data(weights, how):
    """The real steps come last: nothing without data was kept for them."""
    places = {**PLACES, "data": contextlib.nullcontext}
    found = {name: trained(place, weights=weights, **how) for name, place in places.items()}
    assert found["FakeTensorMode"] == found["meta"] == found["data"] and found["data"]


@pytest.mark.parametrize("weights", ["stochastic", "split8"])
def test_a_fused_step_without_data(weights):
    """On the meta device torch refuses fused optimizers."""
    real = trained(contextlib.nullcontext, fused=True, weights=weights)
    assert trained(FakeTensorMode, fused=True, weights=weights) == real
    with pytest.raises(RuntimeError, match="fused=True"):
        trained(PLACES["meta"], fused=True, weights=weights)


@pytest.mark.parametrize("weights", [*WAYS])
def test_a_checkpoint_of_masters_without_data(weights):
    """It is taken at once when an optimizer is attached with masters in its checkpoints."""
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.named_parameters())
    hmpx.attach(optimizer, weights, use_master_weights_in_ckpt=weights in ("master", "split", "split8"))
    assert optimizer.state_dict()["param_groups"]
