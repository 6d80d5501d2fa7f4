"""Tensors without data: `FakeTensorMode` and the meta device tell a run's dtypes and sizes before it is paid for."""

import contextlib
from itertools import cycle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hmpx
from hmpx.updates.checkpoints import MASTER_KEY
from tests.support.optimizers import UnlistedAdamW
from tests.support.spanning import spanning

BF16 = torch.bfloat16
PLACES = {"FakeTensorMode": FakeTensorMode, "meta": lambda: torch.device("meta")}
WAYS = ("stochastic", "nearest", "master", "split", "split8")
MASTERS = WAYS[2:]


def model(dtype):
    return nn.Sequential(nn.Linear(130, 40, dtype=dtype), nn.LayerNorm(40, dtype=dtype), nn.Linear(40, 2, dtype=dtype))


def described(state):
    """Dtypes and shapes of everything that an optimizer's checkpoint holds."""
    return {
        (name, key): (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)
        for name, held in state.items()
        for key, value in held.items()
    }


def trained(place, cls=torch.optim.AdamW, options=None, **how):
    with place():
        it = model(BF16)
        optimizer = cls(it.named_parameters(), lr=1e-2, **(options or {}))
        hmpx.attach(optimizer, **how)
        for _ in range(2):
            for p in it.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert {p.dtype for p in it.parameters()} == {BF16}
        return described(optimizer.state_dict()["state"])


@pytest.mark.parametrize(("place", "kernels"), spanning(PLACES, ["native", "float32"]))
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

    found = run(PLACES[place])
    assert found == run(contextlib.nullcontext) and found[:3] == (BF16, torch.float32, BF16)


@pytest.mark.parametrize(
    "cls, weights, how",
    list(
        zip(
            [torch.optim.AdamW] * 5 + [UnlistedAdamW] * 5,
            [*WAYS, *WAYS],
            cycle([{}, *({"state_dtype": each} for each in (BF16, "8bit", "4bit"))]),
        )
    ),
    ids=str,
)
def test_a_step_without_data_leaves_the_state_of_one_with_data(cls, weights, how):
    """The real steps come last: nothing without data was kept for them."""
    places = {**PLACES, "data": contextlib.nullcontext}
    how = {**how, "weights": weights, "use_master_weights_in_ckpt": weights in MASTERS}
    found = {name: trained(place, cls, **how) for name, place in places.items()}
    assert found["FakeTensorMode"] == found["meta"] == found["data"] and found["data"]
    assert (MASTER_KEY in {key for _, key in found["data"]}) is (weights in MASTERS)


@pytest.mark.parametrize("weights", WAYS)
def test_a_model_that_gets_its_data_later_trains_as_one_that_had_it(weights):
    """Parameters that are prepared on the meta device, saved, and stay the same objects when they are filled."""
    recipe = {"parameter_dtype": "bfloat16", "weights": weights, "use_master_weights_in_ckpt": weights in MASTERS}
    found = []
    for place in (PLACES["meta"], contextlib.nullcontext):
        with place():
            it = model(torch.float32)
        optimizer = torch.optim.AdamW(it.parameters(), lr=1e-4)
        hmpx.prepare(it, optimizer, {"opt_level": "O1", **recipe})
        optimizer.state_dict()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            it.to_empty(device="cpu")
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        torch.manual_seed(0)
        for p in it.parameters():
            p.data.normal_()
        for _ in range(3):
            for p in it.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        saved = optimizer.state_dict()["state"]
        found.append([*it.parameters(), *(saved[i][MASTER_KEY] for i in saved if weights in MASTERS)])
        hmpx.restore(optimizer)
    assert len(found[0]) == 6 * (1 + (weights in MASTERS)) and not found[0][0].is_meta
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("weights", ["stochastic", "split8"])
def test_a_fused_step_without_data(weights):
    """On the meta device torch refuses fused optimizers."""
    how = {"options": {"fused": True}, "weights": weights}
    real = trained(contextlib.nullcontext, **how)
    assert trained(FakeTensorMode, **how) == real
    with pytest.raises(RuntimeError, match="fused=True"):
        trained(PLACES["meta"], **how)
