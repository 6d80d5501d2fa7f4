"""What a step may tell an accelerator, as `support.launches` counts it."""

import pytest
import torch

import hmpx
from tests.support import launches
from tests.support.launches import WAYS_OF_A_STEP, minimum, step_of

BF16 = torch.bfloat16
EACH = [way for way in WAYS_OF_A_STEP if way[1] is torch.float32 or way[0] == "stochastic"]  # of weights, of state
BY_TORCHS_KERNELS = [("foreach", *way) for way in EACH[::2]] + [("fused", *way) for way in EACH[1::2]]


def test_a_step_of_torch_is_counted_as_its_kernels_are_written():
    """The fused kernel reads weight, gradient and two states, and writes all but the gradient: 28 bytes."""
    told = step_of(1 << 20, "fused", None, torch.float32, by_kernels=False)
    assert round(told.moved / (1 << 20)) == 28 and told.calls <= 2 and told.peak < 1024


@pytest.mark.parametrize("how, weights, state_dtype", [("hmpx", *way) for way in WAYS_OF_A_STEP] + BY_TORCHS_KERNELS)
def test_a_step_tells_little_and_asks_for_nothing(how, weights, state_dtype):
    """537 M parameters: the step grows with the number of tensors, not with that of elements."""
    elements = 1 << 29
    told = step_of(elements, how, weights, state_dtype, by_kernels=True)
    assert told.calls + told.launches <= 2000 and told.syncs == 0
    assert told.moved / elements <= 1.2 * minimum(elements, how, weights, state_dtype)
    assert told.peak / elements <= (0.5 if how == "hmpx" else 24 / 32)  # FP32 copies of one of 32, and temporaries
    if how == "hmpx" or (how == "fused" and state_dtype is torch.float32):
        larger = step_of(8 * elements, how, weights, state_dtype, by_kernels=True)
        assert larger.calls + larger.launches <= told.calls + told.launches


def test_without_triton_a_step_asks_for_nothing_either(monkeypatch):
    monkeypatch.setattr(launches, "_TENSORS", 3)
    for weights, state_dtype in EACH:
        told = step_of(1 << 20, "foreach", weights, state_dtype, by_kernels=False)
        assert told.syncs == 0 and told.calls > 0, (weights, state_dtype)


def test_without_triton_a_step_grows_with_the_number_of_tensors():
    told = [step_of(1 << size, "foreach", "stochastic", BF16, by_kernels=False) for size in (26, 28)]
    assert told[0].calls == told[1].calls and told[1].peak <= 32 * (1 << 28) / 32  # copies of one of 32 matrices


def test_a_value_that_a_step_asks_for_is_seen(monkeypatch):
    """Were a step to look at a weight, the meta device would refuse."""
    monkeypatch.setattr(hmpx.updates.holding.stores.Stochastic, "begin", lambda store: store.tensor.sum().item())
    with pytest.raises(RuntimeError, match="meta"):
        step_of(1 << 20, "foreach", "stochastic", torch.float32, by_kernels=True)
    assert launches.bytes_of(launches.STATE_CODES["8bit"].kind) == 1 + 2 / 128
