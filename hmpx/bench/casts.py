"""``bench casts``: what one call of one op costs, beside plain torch and `torch.autocast` with the same lists.

The ways of casting that other tables set side by side stand here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hmpx.bench import measure
from hmpx.converting import convert
from hmpx.errors import HmpxError
from hmpx.ops.policies.lists import shipped
from hmpx.regions import cached_weights

_CALLS = 100  # of each op in a row
_SIDE, _BATCH = 512, 8  # of a layer whose weight is cast once


def autocast(device: torch.device, cache: bool = True) -> AbstractContextManager:
    """Return torch.autocast to BF16, with its cache of weights within one forward or without it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)


def converted(device: torch.device) -> AbstractContextManager:
    """Convert torch with the lists that autocast has for the device."""
    folder = shipped() / f"autocast-{device.type}"
    if not folder.is_dir():
        raise HmpxError(f"device {device.type!r}: autocast's lists are there for cpu and cuda")
    bf16, fp32, promote = (folder / f"{side}.txt" for side in ("bf16", "fp32", "promote"))
    return convert(bf16_file_path=bf16, fp32_file_path=fp32, promote_file_path=promote)


def run(repeat: int, device: torch.device) -> measure.Bench:
    """Measure microseconds a call on 8 x 8 tensors, where only the surroundings of an op cost. Weights need gradients.

    Autocast runs without its cache of weights, which within one long context would cast each weight once for all calls.
    """
    calls = _ops(device)
    ways: dict[str, measure.Way] = {
        "torch": (contextlib.nullcontext, calls),
        "autocast": (lambda: autocast(device, cache=False), calls),
        "hmpx": (lambda: converted(device), calls),
    }
    times = measure.times_in(ways, repeat, device, min, _CALLS)
    rows = []
    for name in calls:
        micro = {way: 1e6 * taken[name] for way, taken in times.items()}
        figures = {f"{way} us": value for way, value in micro.items()}
        ratios = {f"hmpx/{peer}": micro["hmpx"] / micro[peer] for peer in ("autocast", "torch")}
        rows.append(measure.Line(name, figures | ratios))
    return measure.Bench(f"One call on 8 x 8 tensors, autocast's lists, {measure.where(device)}", rows)


def run_kept(repeat: int, device: torch.device) -> measure.Bench:
    """Measure microseconds of a linear layer without gradients whose weight and bias are cast already."""
    layer = nn.Linear(_SIDE, _SIDE, device=device)
    low = nn.Linear(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
    x = torch.randn(_BATCH, _SIDE, device=device)
    x16 = x.bfloat16()

    @contextlib.contextmanager
    def kept() -> Iterator[None]:
        with converted(device), cached_weights():
            yield

    ways: dict[str, measure.Way] = {
        "torch, FP32": (contextlib.nullcontext, {"": lambda: layer(x)}),
        "torch, BF16 model": (contextlib.nullcontext, {"": lambda: low(x16)}),
        "autocast, the weight in its cache": (lambda: autocast(device), {"": lambda: layer(x)}),
        "hmpx": (lambda: converted(device), {"": lambda: layer(x)}),
        "hmpx, in cached_weights()": (kept, {"": lambda: layer(x)}),
    }
    with torch.no_grad():
        times = measure.times_in(ways, repeat, device, min, _CALLS // 10)
    rows = [measure.Line(way, {"us": 1e6 * taken[""]}) for way, taken in times.items()]
    return measure.Bench(f"A linear layer, {_BATCH} x {_SIDE} to {_SIDE}, {measure.where(device)}", rows)


def _ops(device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return calls by name, and a step in which nothing is to be rounded.

    On CPU linear, matmul and conv2d are in the bf16 list, mse_loss in fp32, others in none.
    """

    def make(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(8, 8, device=device, dtype=dtype)
        return x, nn.Parameter(torch.randn_like(x)), nn.Parameter(torch.zeros(8, device=device, dtype=dtype))

    x, weight, bias = make(torch.float32)
    x16, weight16, bias16 = make(torch.bfloat16)
    image, kernel = torch.randn(1, 1, 8, 8, device=device), nn.Parameter(torch.randn(1, 1, 3, 3, device=device))
    stepped = [make(torch.float32)[1] for _ in range(6)]
    for p in stepped:
        p.grad = torch.zeros_like(p)
    return {
        "SGD.step, six FP32 tensors": torch.optim.SGD(stepped).step,
        "linear, BF16 comes": lambda: F.linear(x16, weight16, bias16),
        "linear, FP32 comes": lambda: F.linear(x, weight, bias),
        "matmul, BF16 comes": lambda: torch.matmul(x16, weight16),
        "matmul, FP32 comes": lambda: torch.matmul(x, weight),
        "x @ y, BF16 comes": lambda: x16 @ weight16,
        "x @ y, FP32 comes": lambda: x @ weight,
        "conv2d, FP32 comes": lambda: F.conv2d(image, kernel),
        "mse_loss, FP32 comes": lambda: F.mse_loss(x, weight),
        "mse_loss, BF16 comes": lambda: F.mse_loss(x16, weight16),
        "layer_norm, FP32 comes": lambda: F.layer_norm(x, (8,), bias, bias),
        "softmax, in no list": lambda: F.softmax(x16, -1),
        "gelu, in no list": lambda: F.gelu(x16),
        "x + y, in no list": lambda: x16 + weight16,
    }
