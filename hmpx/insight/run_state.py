"""Puts back what a run of a model changes besides its results: random generators and buffers.

Compiled functions run eagerly meanwhile, since a compiled graph hides its ops.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from hmpx.base import process_state
from hmpx.base.changes import Changes
from hmpx.base.compiling import when_imported

_cat, _cpu = torch.cat, torch.default_generator  # torch's own: an observer asks for the state while ops are patched


def get_state() -> torch.Tensor:
    """Return the state of torch's generators (CPU and GPUs in use) as bytes; it changes when a number is drawn."""
    state = _cpu.get_state()
    if not torch.cuda.is_initialized():
        return state
    return _cat([state, *torch.cuda.get_rng_state_all()])


def set_state(state: torch.Tensor) -> None:
    """Restore a state from `get_state`, so that the same numbers are drawn again."""
    of_cpu = _cpu.get_state().numel()
    _cpu.set_state(state[:of_cpu])
    if state.numel() > of_cpu:
        devices = torch.cuda.device_count()
        torch.cuda.set_rng_state_all([*state[of_cpu:].view(devices, -1)])


@contextlib.contextmanager
def kept(model: Any) -> Iterator[None]:
    """Put back the random generators of torch, Python and NumPy, the counts of gradients that were rounded by hmpx's
    numbers, and the buffers of a module, at the end.
    """
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    tables = [vars(module).get("_buffers", {}) for module in modules]
    buffers = [(each, dict(each)) for each in tables]  # those that are None too
    values = {id(b): b.detach().clone() for _, owned in buffers for b in owned.values() if b is not None}
    python, numpy = random.getstate(), sys.modules.get("numpy")
    rounded, before = process_state.gradients_rounded, dict(process_state.gradients_rounded)
    drawn = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            rounded.clear()
            rounded.update(before)
            if numpy is not None:
                numpy.random.set_state(drawn)
            with torch.no_grad():
                for now, owned in buffers:
                    now.update(owned)
                    for buffer in owned.values():
                        if buffer is not None:
                            buffer.copy_(values[id(buffer)])


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled functions as they are written, also where Dynamo is imported only meanwhile."""
    with contextlib.ExitStack() as stack:
        changes = Changes()
        stack.callback(changes.close)
        when_imported("torch._dynamo", lambda _: stack.enter_context(torch.compiler.set_stance("force_eager")), changes)
        yield
