"""Errors that a program raises because something in it is in BF16."""

from __future__ import annotations

import torch


def said(error: Exception) -> str:
    """What such an error says, in one line. That memory ran out is no matter of lists, and is raised again."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        raise error
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
