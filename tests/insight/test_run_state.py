"""The state of random generators, with a GPU and without one, and what else a run changes."""

import contextlib
import random
import subprocess
import sys
import textwrap

import numpy
import pytest
import torch
from torch import nn

from hmpx.insight.tensors import put_back, random_state, set_random_state


def test_gpus_that_are_in_use_are_put_back_too(monkeypatch):
    """With a stand-in for two of them, whose states are 16 bytes each, as CUDA's."""
    held = [torch.full((16,), 1, dtype=torch.uint8), torch.full((16,), 2, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(held))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [each.clone() for each in held])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: held.__setitem__(slice(None), states))
    state, before = random_state(), [each.clone() for each in held]
    held[1][:] = 7
    assert not torch.equal(state, random_state())
    set_random_state(state)
    assert torch.equal(state, random_state())
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


@pytest.mark.parametrize("error", [None, KeyError])
def test_what_a_run_changes_beside_its_results_is_put_back(error):
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("nothing", None)
    before, buffers = model[0].running_mean.clone(), dict(model[0].named_buffers())
    numbers = (
        random.Random(0).random(),
        numpy.random.RandomState(0).rand(),
        torch.rand(1, generator=torch.Generator().manual_seed(0)),
    )
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    with contextlib.suppress(KeyError), put_back(model):
        _ = random.random(), numpy.random.rand(), torch.rand(1)
        model[0].running_mean.add_(1)
        model[0].running_var = torch.zeros(2)
        model.nothing = torch.ones(1)
        if error is not None:
            raise error
    torch_again = torch.rand(1)
    assert (random.random(), numpy.random.rand()) == numbers[:2] and torch.equal(torch_again, numbers[2])
    assert torch.equal(model[0].running_mean, before) and model.nothing is None
    assert all(model[0].get_buffer(name) is buffer for name, buffer in buffers.items())


@pytest.mark.slow
def test_what_is_compiled_with_a_dynamo_that_is_loaded_meanwhile_runs_as_it_is_written():
    code = """
        import sys, torch, hmpx
        linear, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
        with hmpx.convert(), hmpx.record() as log:
            assert "torch._dynamo" not in sys.modules
            torch.compile(linear, fullgraph=True, backend="eager")(x)
        assert [site.op for site in log.sites] == ["linear"], log
        graphs = []
        torch.compile(linear, backend=lambda module, _: graphs.append(module) or module)(x)
        assert len(graphs) == 1  # it compiles again
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
