"""Runs compiled code as it is written, since a compiled graph hides its ops."""

from __future__ import annotations

import contextlib
import sys

import torch


def eager() -> contextlib.AbstractContextManager:
    """Compiled functions, of which there are none before Dynamo is imported, run as they are written."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else contextlib.nullcontext()
