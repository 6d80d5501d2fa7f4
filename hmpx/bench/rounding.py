"""``bench rounding``: FP32 to BF16 by stochastic rounding, beside torch's own cast."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hmpx.bench import measure
from hmpx.rounding import eager, native, triton


def run(elements: int, repeat: int, device: torch.device) -> measure.Bench:
    """The reference is ``copy_``, which rounds to nearest."""
    x = torch.randn(elements, device=device)
    out = torch.empty(elements, dtype=torch.bfloat16, device=device)
    candidates: dict[str, Callable] = {"torch copy_": lambda: out.copy_(x)}
    if device.type == "cpu" and native.library() is not None:
        candidates["hmpx C kernel"] = lambda: native.round_list([native.Rounding(out, x, "")], 0)
    if device.type == "cuda" and triton.available():
        candidates["hmpx Triton kernel"] = lambda: triton.round_list([native.Rounding(out, x, "")], 0)
    candidates["hmpx eager kernel"] = lambda: eager.round_(out, x, 0x9E3779B97F4A7C15, 0)
    candidates["torch randint"] = lambda: _randint(out, x)
    candidates |= _torchao(out, x)
    times = measure.best_times(candidates, repeat, device)
    more = {name: {"GB/s": 6 * elements / seconds / 1e9} for name, seconds in times.items()}
    return measure.Bench(f"FP32 to BF16, {elements} elements, {measure.where(device)}", measure.rows(times, more))


def _randint(out: torch.Tensor, x: torch.Tensor) -> None:
    """The usual way: random low bits from the global generator, then cut off."""
    bits = x.view(torch.int32) + torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device)
    out.copy_((bits & -65536).view(torch.float32))


def _torchao(out: torch.Tensor, x: torch.Tensor) -> dict[str, Callable]:
    try:
        from torchao.optim.quant_utils import _fp32_to_bf16_sr
    except ImportError:
        return {}
    compiled = torch.compile(_fp32_to_bf16_sr)
    return {
        "torchao": lambda: out.copy_(_fp32_to_bf16_sr(x)),
        "torchao, compiled": lambda: out.copy_(compiled(x)),
    }
