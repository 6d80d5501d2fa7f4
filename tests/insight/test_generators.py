"""The state of torch's random generators, with a GPU and without one."""

import torch

from hmpx.insight import generators


def test_what_is_drawn_after_it_is_drawn_again():
    state = generators.get_state()
    first = torch.rand(3)
    assert not torch.equal(state, generators.get_state())
    generators.set_state(state)
    assert torch.equal(torch.rand(3), first)
    generators.set_state(state)


def test_gpus_that_are_in_use_are_put_back_too(monkeypatch):
    """With a stand-in for two of them, whose states are 16 bytes each, as CUDA's."""
    held = [torch.full((16,), 1, dtype=torch.uint8), torch.full((16,), 2, dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(held))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [each.clone() for each in held])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: held.__setitem__(slice(None), states))
    state, before = generators.get_state(), [each.clone() for each in held]
    held[1][:] = 7
    assert not torch.equal(state, generators.get_state())
    generators.set_state(state)
    assert torch.equal(state, generators.get_state())
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))
