"""Real architectures under `convert()`: autocast's lists give autocast's bits, the default lists stay near FP32.

Autocast's cache of weights is off: it adds the gradients of a weight that is used twice up in BF16.
"""

from __future__ import annotations

import functools

import pytest
import torch

import hmpx
from tests.downstream.comparing import differences, held_functions, made, run, under_autocast, under_its_lists
from tests.downstream.zoo import NO_KERNEL, ZOO

pytestmark = pytest.mark.filterwarnings("ignore")

# Where the products of all time steps, inside of one op, share one cast of their weight.
CACHED = {"torch gru"}


@pytest.mark.parametrize("name", ZOO)
def test_autocasts_lists_give_the_bits_of_autocast(name):
    """Dtypes and bits of all outputs, gradients and buffers."""
    model, inputs = made(name)
    if "lstm" in name and not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # torch raises there, and hmpx trains
        plain, found = run(model, inputs).gradients, run(model, inputs, under_its_lists).gradients
        assert plain.keys() == found.keys() and all(relative(found[key], plain[key]) < 0.1 for key in plain)
        return
    autocast = functools.partial(under_autocast, cache_enabled=name in CACHED)
    found = differences(run(model, inputs, autocast), run(model, inputs, under_its_lists))
    assert not found, f"{len(found)} differ, {found[:3]}"


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.float() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", [name for name in ZOO if name not in NO_KERNEL])
def test_the_default_lists_stay_near_fp32_and_leave_no_trace(name):
    """Each output within 4 % of FP32 in norm, 2 elements in 100 further off than 2 % of the largest, gradients 25 %."""
    model, inputs = made(name)
    functions, plain = held_functions(model), run(model, inputs)
    converted = run(model, inputs, hmpx.convert)
    assert all(tensor.isfinite().all() for tensor in (*converted.outputs.values(), *converted.gradients.values()))
    assert differences(plain, converted), "nothing was cast"
    for key, expected in plain.outputs.items():
        far = (converted.outputs[key].float() - expected).abs() > 0.02 * expected.abs().max()
        assert relative(converted.outputs[key], expected) < 0.04 and far.float().mean() < 0.02, key
    gradients = [torch.cat([g.reshape(-1) for g in each.gradients.values()]) for each in (converted, plain)]
    assert relative(*gradients) < 0.25
    assert held_functions(model) == functions
    assert not differences(plain, run(model, inputs))


@pytest.mark.parametrize("name", NO_KERNEL)
def test_an_op_without_a_bf16_kernel_raises_under_the_default_lists_and_nothing_stays(name):
    model, inputs = made(name)
    functions, plain = held_functions(model), run(model, inputs)
    with pytest.raises(RuntimeError, match=NO_KERNEL[name]):
        run(model, inputs, hmpx.convert)
    assert held_functions(model) == functions
    assert not differences(plain, run(model, inputs))
