"""In which precision products run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hmpx.insight.dispatch import OpLook, in_autocast
from hmpx.insight.finding import Finding, Names, percent, some
from hmpx.insight.notes import Notes, OpCall
from hmpx.insight.places import short_place
from hmpx.insight.tensors import LOW

_WIDE = torch.float32
MATMULS = frozenset(
    "mm addmm bmm baddbmm addmv mv dot convolution mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable".split()
)


def look_at_products(notes: Notes, op: OpCall) -> None:
    """Count the FLOPs of matrix products of the forward pass, by precision."""
    if op.name not in MATMULS or not op.results or not op.trains:
        return
    if op.name == "convolution":
        flops = 2 * op.out.numel() * math.prod(op.given[1].shape[1:])  # groups are left out
    else:
        inner = op.given[1] if op.name in ("addmm", "baddbmm", "addmv") else op.given[0]
        flops = 2 * op.out.numel() * (inner.shape[-1] if inner.dim() else 1)
    if op.out.dtype in LOW:
        half = op.out.dtype is torch.float16
        notes.note("product in low", op, flops=flops, autocast=in_autocast(op.out), half=half)
    elif op.out.dtype is _WIDE:
        notes.note("product", op, _precision(op.out), flops=flops, gpu=op.out.is_cuda)


def _precision(out: torch.Tensor) -> str:
    """Return which of "highest", "high" and "medium" holds on a device: torch has a switch for all, and newer ones."""
    backend = torch.backends.cuda if out.is_cuda else torch.backends.mkldnn
    own = getattr(getattr(backend, "matmul", None), "fp32_precision", "none")
    if (known := {"ieee": "highest", "tf32": "high", "bf16": "medium"}.get(own)) is not None:
        return known
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer switches say something else of another device
        return "highest"


def are_low_by_hand(notes: Notes) -> bool:
    """Whether the program itself, without torch.autocast, computes products in low precision."""
    spots = notes.spots("product in low")
    return bool(spots) and not any(spot.numbers["autocast"] for spot in spots)


def autocast_dtype(notes: Notes) -> torch.dtype | None:
    """Return the dtype of the products in the program's own torch.autocast; None if there are none."""
    spots = [spot for spot in notes.spots("product in low") if spot.numbers["autocast"]]
    return (torch.float16 if any(spot.numbers["half"] for spot in spots) else torch.bfloat16) if spots else None


def of_products(notes: Notes, names: Names) -> Iterator[Finding]:
    low, wide = notes.spots("product in low"), notes.spots("product")
    flops = [sum(spot.numbers["flops"] for spot in spots) for spots in (low, wide)]
    share = flops[1] / (sum(flops) or 1)
    if any(spot.numbers["autocast"] for spot in low) and share > 0.1:
        spots = sorted(wide, key=lambda spot: -spot.numbers["flops"])
        modules = tuple(dict.fromkeys(spot.module or short_place(spot.where) for spot in spots))
        said = f"{percent(share)} of the products of the forward pass ran in float32, outside of autocast: "
        do = "call them inside of torch.autocast, unless they are in float32 for a reason"
        yield Finding("autocast", False, said + some(modules), do, spots[0].where, modules, weight=0.15)
    precision = wide[0].said if wide else ""
    if precision == "medium" or (precision == "high" and any(spot.numbers["gpu"] for spot in wide)):
        digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
        said = f'float32_matmul_precision is "{precision}": products in float32, {percent(share)} of all, may keep '
        do = 'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason'
        yield Finding("matmul precision", False, f"{said}{digits} of each number", do, weight=0.1)


PRODUCTS = OpLook(look_at_products, of_products, "forward")
