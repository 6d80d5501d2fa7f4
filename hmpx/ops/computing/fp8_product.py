"""The product of two matrices in FP8 or FP4, and its gradients: both operands are cast, and their codes multiplied.

**The maths.** A code of FP8 is exact in BF16 and the product of two is exact in FP32, so codes that are multiplied in
BF16 or FP32 and then scaled give the numbers of an FP8 tensor core, except for the order of the sum.

**One rounding.** A result in BF16 must not be rounded before it is scaled, as well as after. A scale that is a power of
two changes no digit of a BF16 product. One scale for the whole product is a factor of it (`alpha` of ``addmm``), which
a CPU applies before it rounds. All other scales want the product in FP32; where they differ along the sum (blocks), the
numbers are decoded before they are multiplied. NVFP4 has both: a number times the scale of its block is exact in BF16,
and the scale of the tensor is a factor of the whole product.

Everything is written in aten ops, which no wrapper of a conversion stands in front of.

**Grouped products**, as mixtures of experts take them: rows of `a` in groups, each with a matrix of its own. They are
for scales that are powers of two ("rowwise" of a torchao recipe, "mx"), with which a code is exact in BF16. Codes are
decoded and multiplied in BF16, which rounds once; on GPUs too, where FP8 gains no time here. The sum of a weight's
gradient runs over the rows of a group: a scale of rows is that of a column in its group. Nobody waits for `offs`.
"""

from __future__ import annotations

import functools
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hmpx.base.process_state import fp8_watchers
from hmpx.ops.policies.fp8_format import BLOCK_OF, Format, decoded, encoded, factors, in_parts, mixed, of_scales

Tensor = torch.Tensor
aten = torch.ops.aten


class How(NamedTuple):
    """A format, and how codes are multiplied: "scaled_mm", "bfloat16" or "float32".

    weight: whether the second operand is one.
    """

    format: Format
    by: str
    weight: bool


class Cast(NamedTuple):
    """One operand of a product: its format, and how its scales are taken.

    role: its name for a watcher; "" if the watcher has seen it before. site: of a gradient that is rounded
    stochastically, the product that it is cast for.
    """

    name: str
    scaling: str
    weight: bool = False
    role: str = ""
    site: str = ""


def watching() -> Any:
    """Return the watcher of FP8 casts in this thread; None if there is none."""
    return fp8_watchers.get(get_ident()) if fp8_watchers else None


class Codes(NamedTuple):
    """A tensor as it is multiplied: FP8 codes for scaled_mm, else their numbers, exact in BF16 or in FP32.

    scale: decodes it; None where all scales differ along the sum, so that the numbers are decoded already.
    """

    codes: Tensor
    scale: Tensor | None


def coded(x: Tensor, cast: Cast, dim: int, how: How, watcher: Any = None) -> Codes:
    """Return (..., M, K) in FP8, for a product that sums over `dim`."""
    form = how.format
    codes, scale, whole = in_parts(x, cast.name, form, dim, cast.scaling, cast.weight, cast.site)
    if watcher is not None:
        all_scales = scale if whole is None else aten.mul(scale, whole)
        shared = functools.partial(of_scales, form=form, dim=dim, scaling=cast.scaling, weight=cast.weight)
        watcher.seen(cast.role, x, codes, all_scales, cast.name, shared)
    # On a CPU, torch's scaled_mm refuses scales of blocks; of stacks of matrices it has no product anywhere.
    if how.by == "scaled_mm" and form.scaling not in BLOCK_OF and x.dim() == 2:
        return Codes(codes, scale)
    numbers, factor = decoded(codes, cast.name, form.saturating)
    scale = aten.mul(scale, factor)
    if form.scaling not in BLOCK_OF:
        return Codes(aten.to.dtype(numbers, torch.bfloat16), scale)
    wide = torch.bfloat16 if form.exact_scales and how.by != "float32" else torch.float32
    return Codes(aten.to.dtype(aten.mul_(numbers, scale), wide), whole)


def multiply(a: Codes, b: Codes, how: How, dtype: torch.dtype) -> Tensor:
    """Multiply the decoded numbers of (..., M, K) and (..., K, N); the result is in `dtype`."""
    if a.scale is None or b.scale is None:
        return _as(dtype, aten.matmul(a.codes, b.codes))
    if a.codes.dtype.itemsize == 1:
        return _scaled_mm(a.codes, a.scale, b.codes, b.scale, dtype)
    if how.by != "float32" and a.codes.is_cpu and a.scale.dim() == b.scale.dim() == 0:
        return _as(dtype, torch.ops.hmpx.scaled_product(a.codes, b.codes, aten.mul(a.scale, b.scale)))
    if how.by != "float32" and how.format.power_of_two:
        made = aten.to.dtype(aten.matmul(a.codes, b.codes), torch.float32)
    else:
        made = wide_product(a.codes, b.codes)
    return _as(dtype, aten.mul_(aten.mul_(made, a.scale), b.scale))


def _as(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return x in a dtype.

    `aten.to.dtype` would return x itself where it has the dtype already. Dynamo of torch 2.11 then takes the result of
    a Function for two of its outputs, and loses its gradient.
    """
    return x if x.dtype is dtype else aten.to.dtype(x, dtype)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in FP32, of two BF16 matrices or stacks of them; NVIDIA's GPUs take as long as for BF16."""
    if a.is_cuda and torch.version.hip is None:
        return (aten.mm if a.dim() == 2 else aten.bmm).dtype(a, b, torch.float32)
    return aten.matmul(aten.to.dtype(a, torch.float32), aten.to.dtype(b, torch.float32))


def _scaled_product(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Return ``scale * (a @ b)``, rounded once, on a CPU.

    `alpha` is a number of Python, so this is an op of its own, which compilers and torch.func do not look into.
    """
    added = aten.addmm if a.dim() == 2 else aten.baddbmm
    return added(a.new_empty(1), a, b, beta=0, alpha=scale.item())  # with beta=0 nothing in the first counts


if not hasattr(torch.ops.hmpx, "scaled_product"):  # an earlier import of hmpx has made it
    _ops = torch.library.Library("hmpx", "FRAGMENT")
    _ops.define("scaled_product(Tensor a, Tensor b, Tensor scale) -> Tensor")
    _ops.impl("scaled_product", _scaled_product, "CPU")
    torch.library.register_fake(
        "hmpx::scaled_product", lambda a, b, scale: a.new_empty((*a.shape[:-1], b.shape[-1])), lib=_ops
    )


def _scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Call torch's own product.

    It wants the sum a multiple of 16, the rows of the first and the columns of the second contiguous, and two scales of
    one kind.
    """
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


def product(a: Tensor, b: Tensor, how: How) -> Tensor:
    """Return ``a @ b`` in FP8, of (M, K) and (K, N) or (B, M, K) and (B, K, N), with gradients as the format says."""
    return _Product.apply(a, b, how)[0]


class _Product(torch.autograd.Function):
    """The product; and, where every product of a tensor wants the same codes of it, the codes of `a` and `b`.

    That is where all of a tensor share one scale: each is cast once then, and its codes are kept for the backward pass
    in its place.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, how: How) -> tuple[Tensor, ...]:
        form, watcher = how.format, watching()
        if "output" not in form.products:
            return (aten.matmul(a, b),)
        codes_a = coded(a, Cast(form.forward, form.scaling, role="inputs"), -1, how, watcher)
        of_b = Cast(form.forward, form.scaling, how.weight, "weights" if how.weight else "inputs")
        codes_b = coded(b, of_b, -2, how, watcher)
        made = multiply(codes_a, codes_b, how, a.dtype)
        return (made, *codes_a, *codes_b) if form.scaling == "tensorwise" else (made,)  # type: ignore[return-value]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, How], output: tuple[Tensor, ...]) -> None:
        a, b, ctx.how = inputs
        ctx.watcher, ctx.dtype, products = watching(), a.dtype, ctx.how.format.products
        codes = output[1:]
        ctx.mark_non_differentiable(*codes)
        whole = "weight_gradient" in products and not ctx.how.format.hadamard
        of_a = codes[:2] if codes and whole else (a, None)
        of_b = codes[2:] if codes and "input_gradient" in products else (b, None)
        ctx.save_for_backward(*of_a, *of_b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, None]:
        a, scale_a, b, scale_b = ctx.saved_tensors
        how: How = ctx.how
        form = how.format
        cast = Cast(form.backward, form.scaling, role="gradients")
        codes: Codes | None = None  # of the gradient
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            if "input_gradient" in form.products:
                codes = coded(gradient, cast._replace(site=_site(form, "input")), -1, how, ctx.watcher)
                cast = cast._replace(role="")
                scaling = "tensorwise" if form.weight_tensorwise else form.scaling
                turned = _turned(b, scale_b, Cast(form.forward, scaling, how.weight), -2, how)
                of_a = multiply(codes, turned, how, ctx.dtype)
            else:
                of_a = aten.matmul(gradient, b.transpose(-1, -2))
        if ctx.needs_input_grad[1]:
            if "weight_gradient" in form.products:
                if form.hadamard:
                    a, gradient = mixed(a, -2), mixed(gradient, -2)
                if codes is None or form.scaling != "tensorwise" or form.hadamard:
                    codes = coded(gradient, cast._replace(site=_site(form, "weight")), -2, how, ctx.watcher)
                turned = _turned(a, scale_a, Cast(form.forward, form.scaling), -1, how)
                of_b = multiply(turned, codes, how, ctx.dtype)
            else:
                of_b = aten.matmul(a.transpose(-1, -2), gradient)
        return of_a, of_b, None


def _site(form: Format, of: str) -> str:
    return f"gradient of the {of}" if form.stochastic else ""


def _turned(kept: Tensor, scale: Tensor | None, cast: Cast, dim: int, how: How) -> Codes:
    """Return a kept operand, transposed and in FP8: with a scale, it is codes already."""
    other = kept.transpose(-1, -2)
    return coded(other, cast, dim, how) if scale is None else Codes(other, scale)


# Grouped products


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
