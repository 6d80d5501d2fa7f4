"""``bench rounding`` and ``bench step``: stochastic rounding, and an AdamW step in every way of holding weights."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from bench import measure
from bench.models import LISTS
from hmpx.base.torch_private import copy_all
from hmpx.rounding import native, stochastic, table, triton
from hmpx.updates.attach import attach
from hmpx.updates.holding.state_forms import StateDtype
from hmpx.updates.holding.stores import Weights

_LR = 1e-4
_KEY = 0x9E3779B97F4A7C15  # of the random numbers
Params = list[nn.Parameter]


def rounding(elements: int, repeat: int, device: torch.device) -> measure.Bench:
    """Measure FP32 to BF16. The reference is ``copy_``, which rounds to nearest."""
    x = torch.randn(elements, device=device)
    out = torch.empty(elements, dtype=torch.bfloat16, device=device)
    candidates: dict[str, Callable] = {"torch copy_": lambda: out.copy_(x)}
    if device.type == "cpu" and native.library() is not None:
        candidates["hmpx C kernel"] = lambda: table.launch_once(native, [table.row_of_rounding(out, x, _KEY, 0)])
    if device.type == "cuda" and triton.available():
        candidates["hmpx Triton kernel"] = lambda: table.launch_once(triton, [table.row_of_rounding(out, x, _KEY, 0)])
    candidates["hmpx eager kernel"] = lambda: stochastic.round_(out, x, _KEY, 0)
    candidates["torch randint"] = lambda: _randint(out, x)
    notes = []
    for name, candidate in _torchao(out, x).items():
        try:
            candidate()
            candidates[name] = candidate
        except Exception as error:  # torch.compile finds no compiler, or torch lies on a path with a space
            notes.append(_why_not(name, error))
    times = measure.best_times(candidates, repeat, device)
    more = {name: {"GB/s": 6 * elements / seconds / 1e9} for name, seconds in times.items()}
    title = f"FP32 to BF16, {elements} elements, {measure.where(device)}"
    return measure.Bench(title, measure.rows(times, more), notes)


def _randint(out: torch.Tensor, x: torch.Tensor) -> None:
    """Round in the usual way: add random low bits from the global generator, then cut them off."""
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


def step(elements: int, repeat: int, device: torch.device, *, peers: bool = True) -> measure.Bench:
    """Measure a step in every way of holding weights, and of peers. The reference is torch's fused FP32 AdamW.

    ``beside``: measured bytes per parameter that stay beside weights and gradients; ``peak``: that a step takes more.
    """
    side = 1024 if elements >= 8 << 20 else 128
    shapes = [(side, side)] * max(1, elements // side**2)
    count = sum(a * b for a, b in shapes)
    candidates: dict[str, Callable] = {}
    more: dict[str, dict[str, float]] = {}
    notes: list[str] = []
    for name, (dtype, make) in (_ways() | (_peers() if peers else {})).items():
        params = _parameters(shapes, dtype, device)
        made: list[Callable] = []

        def start(params: Params = params, make: Callable = make, made: list = made) -> None:
            made.append(make(params))
            made[0]()

        try:
            _, stays = measure.memory(start, device)
        except Exception as error:
            if name not in _PEERS:
                raise
            notes.append(_why_not(name, error))
            continue
        peak, left = measure.memory(made[0], device)
        weights = 2 * params[0].element_size()
        more[name] = {"B/param": weights + stays / count, "beside": stays / count, "peak": (peak - left) / count}
        candidates[name] = made[0]
    times = measure.best_times(candidates, repeat, device)
    return measure.Bench(
        f"AdamW step, {count / 1e6:.1f} M parameters, {measure.where(device)}", measure.rows(times, more), notes
    )


def steps_of_models(models: Sequence[str], repeat: int, device: torch.device) -> measure.Bench:
    """Make one row for the parameters of each model: torch's fused FP32 AdamW, and ratios to it."""
    ways = _ways()
    return measure.Bench(
        f"AdamW step of a model's parameters, ratios to torch's fused FP32 one, {measure.where(device)}",
        [_row(model, {column: ways[name] for column, name in _COLUMNS.items()}, repeat, device) for model in models],
    )


_COLUMNS = {
    "torch": "torch fused, FP32 weights",
    "stochastic": "hmpx stochastic, torch fused",
    "split": "hmpx split, torch fused",
    "fused": "hmpx fused",
    "fused, BF16 states": "hmpx fused, BF16 states",
    "fused, 8-bit states": "hmpx fused, 8-bit states",
}


def _row(model: str, ways: dict[str, tuple[torch.dtype, Callable]], repeat: int, device: torch.device) -> measure.Line:
    shapes = list(LISTS[model]())
    steps = {column: make(_parameters(shapes, dtype, device)) for column, (dtype, make) in ways.items()}
    times = measure.best_times(steps, repeat, device)
    reference = times.pop("torch")
    name = f"{model}, {len(shapes)} tensors, {sum(map(math.prod, shapes)) / 1e6:.2f} M"
    return measure.Line(name, {"torch ms": 1e3 * reference, **{k: seconds / reference for k, seconds in times.items()}})


def _parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Params:
    params = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


_HELD: dict[str, tuple[Weights, StateDtype]] = {
    "stochastic": ("stochastic", torch.float32),
    "master": ("master", torch.float32),
    "split": ("split", torch.float32),
    "BF16 states": ("stochastic", torch.bfloat16),
    "8-bit states": ("stochastic", "8bit"),
    "4-bit states": ("stochastic", "4bit"),
    "split8, 8-bit states": ("split8", "8bit"),
}


def _ways() -> dict[str, tuple[torch.dtype, Callable[[Params], Callable]]]:
    """Return by name the dtype of the weights, and what makes a step function."""
    bf16 = torch.bfloat16
    found: dict[str, tuple[torch.dtype, Callable[[Params], Callable]]] = {
        "torch fused, FP32 weights": (torch.float32, lambda params: _torch(params).step),
        "torch fused, BF16 weights, nearest": (bf16, lambda params: _torch(params).step),
        "FP32 masters by hand, torch fused": (bf16, _masters_by_hand),
        "hmpx stochastic, torch foreach": (bf16, lambda params: _hmpx(params, *_HELD["stochastic"], foreach=True)),
    }
    for name, (weights, state_dtype) in _HELD.items():
        made = functools.partial(_hmpx, weights=weights, state_dtype=state_dtype)
        found[f"hmpx {name}, torch fused"] = bf16, made
    for name, (weights, state_dtype) in _HELD.items():
        made = functools.partial(_hmpx, weights=weights, state_dtype=state_dtype, own=True)
        found["hmpx fused" if name == "stochastic" else f"hmpx fused, {name}"] = bf16, made
    return found


_PEERS: dict[str, tuple[str, str, dict]] = {  # module, class, options
    "torchao _AdamW, stochastic": ("torchao.optim", "_AdamW", {"bf16_stochastic_round": True}),
    "torchao AdamW8bit, stochastic": ("torchao.optim", "AdamW8bit", {"bf16_stochastic_round": True}),
    "torchao AdamW4bit, stochastic": ("torchao.optim", "AdamW4bit", {"bf16_stochastic_round": True}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "optimi AdamW, Kahan": ("optimi", "AdamW", {"kahan_sum": True}),
}


def _peers() -> dict[str, tuple[torch.dtype, Callable[[Params], Callable]]]:
    """Return the optimizers of other libraries, which may not be installed, or may not run here."""

    def maker(module: str, cls: str, options: dict) -> Callable[[Params], Callable]:
        return lambda params: getattr(importlib.import_module(module), cls)(params, lr=_LR, **options).step

    return {name: (torch.bfloat16, maker(*peer)) for name, peer in _PEERS.items()}


def _why_not(name: str, error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{name}: not measured, {error.name} is not installed"
    return f"{name}: does not run here, {measure.in_a_line(error)}"


def _torch(params: Params, foreach: bool = False) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=_LR, fused=not foreach, foreach=foreach or None)


def _hmpx(
    params: Params, weights: Weights, state_dtype: StateDtype, *, foreach: bool = False, own: bool = False
) -> Callable:
    """Return a step. own: by hmpx's formula, and not by torch's step."""
    optimizer = _torch(params, foreach)
    attach(optimizer, weights, names=[str(i) for i in range(len(params))], fused=own, state_dtype=state_dtype)
    return optimizer.step


def _masters_by_hand(params: Params) -> Callable:
    """Make the step of a training script that holds FP32 masters without a library."""
    weights: list[torch.Tensor] = [*params]
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer = _torch(masters)

    def step() -> None:
        for p, master in zip(params, masters, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            copy_all(weights, [*masters])
        optimizer.zero_grad()

    return step
