"""The product of two matrices in FP8, and its gradients.

**The maths.** A code of FP8 is exact in BF16 and the product of two is exact in FP32, so codes that are multiplied in
BF16 or FP32 and then scaled come to what an FP8 tensor core makes, but for the order of the sum and, in BF16, for a
rounding before the scales. Where the scale differs along the sum (blocks that are no power of two), the decoded numbers
are multiplied in FP32.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hmpx.ops.fp8.format import BLOCK, Format
from hmpx.ops.fp8.quantize import quantize
from hmpx.process_state import fp8_watchers

Tensor = torch.Tensor
aten = torch.ops.aten


class How(NamedTuple):
    """A format, and what multiplies: "scaled_mm", "bfloat16" or "float32".

    weight: whether the second operand is one.
    """

    format: Format
    by: str
    weight: bool


class Cast(NamedTuple):
    """One operand of a product: its format, and how its scales are taken.

    role: what a watcher is to know it as; "" where it has been seen before.
    """

    name: str
    scaling: str
    weight: bool = False
    role: str = ""


def watching() -> Any:
    """Who looks at casts in this thread, if anybody does."""
    return fp8_watchers.get(get_ident()) if fp8_watchers else None


def multiply(a: Tensor, b: Tensor, of_a: Cast, of_b: Cast, how: How, dtype: torch.dtype, watcher: Any = None) -> Tensor:
    """(..., M, K) times (..., K, N), both in FP8 along K; the result in `dtype`."""
    form = how.format
    codes_a, scale_a = quantize(a, of_a.name, form, -1, of_a.scaling, of_a.weight)
    codes_b, scale_b = quantize(b, of_b.name, form, -2, of_b.scaling, of_b.weight)
    if watcher is not None:
        watcher.seen(of_a.role, a, codes_a, scale_a, of_a.name)
        watcher.seen(of_b.role, b, codes_b, scale_b, of_b.name)
    if form.scaling in BLOCK:
        wide = torch.bfloat16 if form.exact_in_bf16 and how.by != "float32" else torch.float32
        operands = (aten.mul(aten.to.dtype(codes_a, torch.float32), scale_a),
                    aten.mul(aten.to.dtype(codes_b, torch.float32), scale_b))  # fmt: skip
        return aten.to.dtype(aten.matmul(*(aten.to.dtype(each, wide) for each in operands)), dtype)
    if how.by == "scaled_mm" and a.dim() == 2:
        return _scaled_mm(codes_a, codes_b, scale_a, scale_b, dtype)
    wide = torch.float32 if how.by == "float32" else torch.bfloat16
    product = aten.matmul(aten.to.dtype(codes_a, wide), aten.to.dtype(codes_b, wide))
    scaled = aten.mul(aten.mul(aten.to.dtype(product, torch.float32), scale_a), scale_b)
    return aten.to.dtype(scaled, dtype)


def _scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """torch's own, which wants the sum a multiple of 16, rows of the first, columns of the second in a row, and two
    scales of one kind."""
    if pad := -a.shape[1] % 16:
        a, b = (_padded(a, 0, pad), _padded(b, pad, 0))
    if scale_a.dim() != scale_b.dim():
        scale_a, scale_b = scale_a.expand(a.shape[0], 1), scale_b.expand(1, b.shape[1])
    columns = aten.contiguous(b.t()).t()
    return aten._scaled_mm(aten.contiguous(a), columns, aten.contiguous(scale_a), aten.contiguous(scale_b), None, None,
                           dtype)  # fmt: skip


def _padded(codes: Tensor, rows: int, columns: int) -> Tensor:
    bits = aten.constant_pad_nd(codes.view(torch.uint8), [0, columns, 0, rows])
    return bits.view(codes.dtype)


class Product(torch.autograd.Function):
    """``a @ b`` in FP8, of (M, K) and (K, N) or of (B, M, K) and (B, K, N), with gradients as the format says.

    What it keeps for the backward pass are `a` and `b` as they are, as torch's own product does.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, how: How) -> Tensor:
        form = how.format
        if "output" not in form.products:
            return aten.matmul(a, b)
        of_a = Cast(form.forward, form.scaling, role="inputs")
        of_b = Cast(form.forward, form.scaling, how.weight, "weights" if how.weight else "inputs")
        return multiply(a, b, of_a, of_b, how, a.dtype, watching())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, How], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.how = inputs[2]
        ctx.watcher = watching()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b = ctx.saved_tensors
        how: How = ctx.how
        form = how.format
        of_a = of_b = None
        of_gradient = Cast(form.backward, form.scaling, role="gradients")
        if ctx.needs_input_grad[0]:
            turned = b.transpose(-1, -2)
            if "input_gradient" in form.products:
                scaling = "tensorwise" if form.weight_tensorwise else form.scaling
                of_weight = Cast(form.forward, scaling, how.weight)
                of_a = multiply(gradient, turned, of_gradient, of_weight, how, a.dtype, ctx.watcher)
                of_gradient = of_gradient._replace(role="")
            else:
                of_a = aten.matmul(gradient, turned)
        if ctx.needs_input_grad[1]:
            turned = a.transpose(-1, -2)
            if "weight_gradient" in form.products:
                of_input = Cast(form.forward, form.scaling)
                of_b = multiply(turned, gradient, of_input, of_gradient, how, b.dtype, ctx.watcher)
            else:
                of_b = aten.matmul(turned, gradient)
        return of_a, of_b, None
