"""Grouped products in FP8, as mixtures of experts take them: rows of `a` in groups, each with a matrix of its own.

For scales that are powers of two ("rowwise" of a torchao recipe, "mx"), with which a code is exact in BF16: codes are
decoded and multiplied in BF16, which rounds once; so it is on GPUs too, where FP8 gains no time here. The sum of a
weight's gradient runs over the rows of a group: a scale of rows is that of a column in its group. Nobody waits for
`offs`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hmpx.ops.computing.fp8_casts import encoded, factors
from hmpx.ops.computing.fp8_product import Cast, How, coded, watching
from hmpx.ops.policies.fp8_format import Format

Tensor = torch.Tensor
aten = torch.ops.aten


def why_not_grouped(a: Tensor, b: Tensor, form: Format) -> str:
    """Return why no grouped product of this format takes these; an empty string if one does."""
    if a.dim() != 2 or b.dim() != 3:
        return "a grouped product of other than rows and a stack of matrices"
    if form.scaling != "mx" and not (form.scaling == "rowwise" and form.power_of_two):
        return "a grouped product, which is in FP8 with mx scales, or with scales of rows that are powers of two"
    return ""


class GroupedProduct(torch.autograd.Function):
    """``torch._grouped_mm(a, b, offs)`` of BF16 (M, K) and (E, K, N), with BF16 gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor, how: How) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        form, watcher = how.format, watching()
        ctx.how, ctx.watcher = how, watcher
        if "output" not in form.products:
            return aten._grouped_mm(a, b, offs)
        casts = Cast(form.forward, form.scaling, role="inputs"), Cast(form.forward, form.scaling, True, "weights")
        return _times(a, b, offs, casts, how, watcher)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (a, b, offs), how = ctx.saved_tensors, ctx.how
        form, of_a, of_b = how.format, None, None
        cast = Cast(form.backward, form.scaling, role="gradients")
        if ctx.needs_input_grad[0]:
            of_weight = Cast(form.forward, "tensorwise" if form.weight_tensorwise else form.scaling, True)
            if "input_gradient" in form.products:
                of_a = _times(gradient, b.mT, offs, (cast, of_weight), how, ctx.watcher)
            else:
                of_a = aten._grouped_mm(gradient, b.mT, offs)
        if ctx.needs_input_grad[1]:
            if "weight_gradient" in form.products:
                a, gradient = (_cast_in_groups(x, name, offs, how)
                               for x, name in ((a, form.forward), (gradient, form.backward)))  # fmt: skip
            of_b = aten._grouped_mm(gradient.t(), a, offs).mT  # as torch has it
        return of_a, of_b, None, None


def _times(a: Tensor, b: Tensor, offs: Tensor, casts: tuple[Cast, Cast], how: How, watcher: Any) -> Tensor:
    numbers = [coded(x, cast, dim, how, watcher) for x, cast, dim in ((a, casts[0], -1), (b, casts[1], -2))]
    low = [each.codes if each.scale is None else aten.to.dtype(aten.mul(each.codes, each.scale), torch.bfloat16)
           for each in numbers]  # fmt: skip
    return aten._grouped_mm(*low, offs)


def _cast_in_groups(x: Tensor, name: str, offs: Tensor, how: How) -> Tensor:
    """Return what (M, N) becomes in FP8, for a sum along the rows of each group, in BF16."""
    form = how.format
    if form.scaling == "mx":
        return coded(x, Cast(name, form.scaling), -2, how).codes
    group = aten.bucketize.Tensor(aten.arange(len(x), device=x.device), offs, right=True)  # past the last: none
    wide = aten.to.dtype(x, torch.float32)
    nothing = aten.new_zeros(wide, [len(offs) + 1, x.shape[1]])
    largest = aten.scatter_reduce(nothing, 0, group[:, None].expand_as(x), aten.abs(wide), "amax")
    factor, scale = (aten.index_select(each, 0, group) for each in factors(largest, name, form))
    codes = encoded(aten.mul_(wide, factor), name, form.saturating)
    return aten.to.dtype(aten.mul(aten.to.dtype(codes, torch.float32), scale), torch.bfloat16)
