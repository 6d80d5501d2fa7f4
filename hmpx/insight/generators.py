"""Saves and restores torch's random generators (CPU and GPUs in use), so that an op draws the same numbers again."""

from __future__ import annotations

import torch

_cat, _cpu = torch.cat, torch.default_generator  # torch's own: an observer asks for the state while ops are patched


def get_state() -> torch.Tensor:
    """The state of all generators as bytes; two states are equal if no number was drawn between them."""
    state = _cpu.get_state()
    if not torch.cuda.is_initialized():
        return state
    return _cat([state, *torch.cuda.get_rng_state_all()])


def set_state(state: torch.Tensor) -> None:
    """Restore a state from `get_state`."""
    of_cpu = _cpu.get_state().numel()
    _cpu.set_state(state[:of_cpu])
    if state.numel() > of_cpu:
        devices = torch.cuda.device_count()
        torch.cuda.set_rng_state_all([*state[of_cpu:].view(devices, -1)])
