"""In which precision products run, and whether the gradients of FP16 reach the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hmpx.insight.capture.dispatch import FEW, OpLook, in_autocast
from hmpx.insight.capture.notes import Notes, OpCall
from hmpx.insight.finding import Names, Problem, asked, percent, some
from hmpx.insight.places import short_place
from hmpx.insight.tensors import LOW, sample

_WIDE = torch.float32
_SETTLED = 5  # calls of a GradScaler after which it should have found its scale
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


def of_products(notes: Notes, names: Names) -> Iterator[Problem]:
    low, wide = notes.spots("product in low"), notes.spots("product")
    flops = [sum(spot.numbers["flops"] for spot in spots) for spots in (low, wide)]
    share = flops[1] / (sum(flops) or 1)
    if any(spot.numbers["autocast"] for spot in low) and share > 0.1:
        spots = sorted(wide, key=lambda spot: -spot.numbers["flops"])
        modules = tuple(dict.fromkeys(spot.module or short_place(spot.where) for spot in spots))
        said = f"{percent(share)} of the products of the forward pass ran in float32, outside of autocast: "
        do = "call them inside of torch.autocast, unless they are in float32 for a reason"
        yield Problem("autocast", False, said + some(modules), do, spots[0].where, modules, weight=0.15)
    precision = wide[0].said if wide else ""
    if precision == "medium" or (precision == "high" and any(spot.numbers["gpu"] for spot in wide)):
        digits = "8 bits (BF16)" if precision == "medium" else "11 bits (TF32)"
        said = f'float32_matmul_precision is "{precision}": products in float32, {percent(share)} of all, may keep '
        do = 'torch.set_float32_matmul_precision("highest") where they are in float32 for a reason'
        yield Problem("matmul precision", False, f"{said}{digits} of each number", do, weight=0.1)


def look_at_scale(notes: Notes, op: OpCall) -> None:
    """Count the gradients that FP16 cannot hold."""
    for result in op.results:
        if result.dtype is torch.float16 and result.numel() > 1:
            size = sample(result, FEW).float().abs()
            tiny = (size > 0) & (size < torch.finfo(torch.float16).smallest_normal)
            notes.note("gradient in FP16", op, nonzero=int((size > 0).sum()), tiny=int(tiny.sum()))


def of_scale(notes: Notes, names: Names) -> Iterator[Problem]:
    recipe = {"parameter_dtype": "float32"} if any(p.dtype is torch.float16 for p in names) else {}
    spots, late = notes.spots("gradient in FP16"), notes.skipped[len(notes.skipped) // 2 :]
    nonzero = sum(spot.numbers["nonzero"] for spot in spots)
    if spots and not nonzero and not notes.skipped:
        said = "FP16 without a GradScaler: all gradients that were looked at are zero, so nothing is trained"
        yield Problem(
            "loss scaling", True, said, "torch.amp.GradScaler, or BF16, which needs none", weight=0.9, recipe=recipe
        )
    if nonzero and not notes.skipped:
        share = sum(spot.numbers["tiny"] for spot in spots) / nonzero
        said = f"FP16 without a GradScaler: {percent(share)} of the nonzero gradients are below its normal numbers"
        device = next((p.device.type for p in names), "cuda")
        do, weight = f'torch.amp.GradScaler("{device}"), or BF16, which needs none', 0.3 + 0.5 * share
        yield Problem("loss scaling", share > 0.01, said, do, weight=weight, recipe=recipe)
    if len(late) >= _SETTLED and 2 * sum(late) >= len(late):
        said = f"GradScaler has skipped {sum(late)} of the last {len(late)} steps, down to a scale of {notes.scale:g}: "
        lasts = notes.scale <= 1
        said += "gradients are inf or NaN at any scale" if lasts else "it is still falling, so nothing is known of them"
        do = f"look for the first op that makes them ({asked('--at 3', 'hmpx.doctor(at=[3])')}), or use BF16, which "
        do += "needs no scale"
        yield Problem("GradScaler", lasts, said, do, weight=0.9, recipe=recipe)


def _still_falling(notes: Notes) -> list[str]:
    late = notes.skipped[len(notes.skipped) // 2 :]
    is_falling = len(late) >= _SETTLED and 2 * sum(late) >= len(late) and notes.scale > 1
    return [f"steps: the GradScaler skips them, at a scale of {notes.scale:g} that still falls"] if is_falling else []


PRODUCTS = OpLook(look_at_products, of_products, "forward")
SCALE = OpLook(look_at_scale, of_scale, "backward", unchecked=_still_falling)
