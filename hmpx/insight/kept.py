"""Restores side effects of a run of a model: random generators and buffers."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def kept(model: Any) -> Iterator[None]:
    """Put random number generators (torch's, Python's, NumPy's) and the buffers of a module back at the end."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    buffers = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
    values = {id(b): b.detach().clone() for _, owned in buffers for b in owned.values() if b is not None}
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(drawn)
            with torch.no_grad():
                for now, owned in buffers:
                    now.update(owned)
                    for buffer in owned.values():
                        if buffer is not None:
                            buffer.copy_(values[id(buffer)])
