"""The ways of casting that are measured side by side: none, `torch.autocast`, and hmpx with autocast's own lists."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from hmpx.conversion import convert
from hmpx.errors import HmpxError
from hmpx.ops.policies.op_lists import shipped


def autocast(device: torch.device, cache: bool = True) -> AbstractContextManager:
    """torch.autocast to BF16, with its cache of weights within one forward or without."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)


def hmpx(device: torch.device) -> AbstractContextManager:
    """A conversion with the lists that autocast has for the device."""
    folder = shipped() / f"autocast-{device.type}"
    if not folder.is_dir():
        raise HmpxError(f"device {device.type!r}: autocast's lists are there for cpu and cuda")
    bf16, fp32, promote = (folder / f"{side}.txt" for side in ("bf16", "fp32", "promote"))
    return convert(bf16_file_path=bf16, fp32_file_path=fp32, promote_file_path=promote)


Contexts = dict[str, Callable[[], AbstractContextManager]]


def contexts(device: torch.device, cache: bool = True) -> Contexts:
    """Name -> what to run in."""
    return {
        "torch": contextlib.nullcontext,
        "autocast": lambda: autocast(device, cache),
        "hmpx": lambda: hmpx(device),
    }
