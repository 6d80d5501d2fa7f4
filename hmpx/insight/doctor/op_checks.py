"""What is wrong with a single op, as far as its inputs and its result tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from hmpx.insight.tensors import LOW, Tensor

PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addmv mv dot convolution mkldnn_rnn_layer _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable".split()
)
INTEGERS = frozenset({"_to_copy", "arange"})
_EXACT = {torch.bfloat16: 256, torch.float16: 2048}  # up to these, every integer is a number of the dtype

Check = Callable[[list[Tensor], Tensor, tuple], tuple[str, str]]


def _always(kind: str) -> Check:
    return lambda given, out, args: (kind, "") if given and given[0].dtype in LOW else ("", "")


def _cumulative(given: list[Tensor], out: Tensor, args: tuple) -> tuple[str, str]:
    length = out.shape[args[1]] if out.dim() and len(args) > 1 else out.numel()
    return ("cumulative sum", f"over {length} elements") if length > _EXACT[out.dtype] else ("", "")


def _statistic(given: list[Tensor], out: Tensor, args: tuple) -> tuple[str, str]:
    """Of a vector for each row; a norm of a whole tensor is none of the model's."""
    return ("norm statistics", "") if given[0].dtype in LOW and out.dim() else ("", "")


_LOSSES = "_log_softmax nll_loss_forward nll_loss2d_forward mse_loss smooth_l1_loss huber_loss soft_margin_loss "
_LOSSES += "binary_cross_entropy_with_logits _ctc_loss kl_div multi_margin_loss"
CHECKS: dict[str, Check] = {
    **dict.fromkeys(_LOSSES.split(), _always("loss")),
    **dict.fromkeys("log log2 log10 log1p logsumexp".split(), _always("log")),
    "_softmax": _always("softmax"),
    **dict.fromkeys("rsqrt var std var_mean std_mean".split(), _statistic),
    **dict.fromkeys("cumsum cumprod logcumsumexp".split(), _cumulative),
    "binary_cross_entropy": _always("BCE"),
}


def integers_changed(func: Any, name: str, args: tuple, kwargs: dict, out: Tensor) -> str | None:
    """How many integers became others in low precision; None where none did."""
    if out.dtype not in LOW or out.numel() < 2:
        return None
    if name == "arange":
        exact = func(*args, **{**kwargs, "dtype": torch.float64})
    else:
        exact = args[0]
        if exact.dtype in LOW or exact.dtype is torch.bool or exact.dtype.is_complex:
            return None
        if exact.dtype.is_floating_point:
            if out.numel() <= 64:
                return None
            few = exact.reshape(-1)[:64]
            if bool((few != few.round()).any()) or bool((few == few[0]).all()):
                return None
            if bool((exact != exact.round()).any()) or not bool(torch.isfinite(exact).all()):
                return None
    if not exact.dtype.is_floating_point:
        exact = exact.double()
    changed = exact.to(out.device) != out.to(exact.dtype)
    count = int(changed.sum())
    if not count:
        return None
    first = float(exact[changed].flatten()[0])
    became = float(out[changed].flatten()[0])
    return f"{count} of {out.numel()} integers change, {first:.0f} becomes {became:.0f}"


def flops(name: str, given: list[Tensor], out: Tensor) -> float:
    """Of a product, without regard to groups of a convolution."""
    if name == "convolution":
        return 2.0 * out.numel() * math.prod(given[1].shape[1:])
    inner = given[1] if name in ("addmm", "baddbmm", "addmv") else given[0]
    return 2.0 * out.numel() * (inner.shape[-1] if inner.dim() else 1)
