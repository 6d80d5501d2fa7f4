"""The product of two matrices in FP8 on a GPU with FP8 tensor cores, and its gradients: each operand is cast once.

The three products of a layer take each of three matrices twice, summing along another dimension each time. A matrix is
cast in both directions at once (`fp8_kernels`), and what the backward pass wants waits there as codes: one byte for the
two of an input, and one more for a weight while its layer waits for its backward pass. FSDP2 gathers BF16 weights and
they are cast after that; the codes of a whole weight wait on each rank, unless its layer is checkpointed.

Sums are taken as torchao and TransformerEngine take them: of the output with fast accumulation, of gradients without.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from hmpx.base.torch_private import base_of
from hmpx.ops.computing.fp8_kernels import CodedLines, can_cast, cast_both
from hmpx.ops.policies.fp8_format import CODES, Format
from hmpx.ops.wrapping.weight_cache import current, open_caches

Tensor = torch.Tensor
aten = torch.ops.aten
logger = logging.getLogger("hmpx")


def fits(a: Tensor, b: Tensor, form: Format) -> bool:
    """Return whether `product_of_both` computes the product of (M, K) and (K, N) in this format."""
    if form.forward == "e5m2" or not can_cast(a, b):  # tensor cores have no product of two e5m2
        return False
    if form.scaling == "blockwise":
        aligned = not (a.shape[0] % 128 or a.shape[1] % 512 or b.shape[1] % 512)
        return aligned and not form.power_of_two and multiplies_blocks(a.device)
    return form.scaling in ("tensorwise", "rowwise")


def product_of_both(a: Tensor, b: Tensor, form: Format, weight: bool) -> Tensor:
    """Return ``a @ b`` of BF16 (M, K) and (K, N), with BF16 gradients. weight: whether `b` is one."""
    grad = torch.is_grad_enabled()
    if weight and not grad and open_caches and (kept := _kept(b, form)) is not None:
        lines, _ = cast_both(a, form.forward, form, form.scaling, False, True, False)
        return times(lines, kept, a.dtype, True)  # type: ignore[arg-type]
    return _Product.apply(a, b, form, weight, grad and a.requires_grad, grad and b.requires_grad)


def _kept(b: Tensor, form: Format) -> CodedLines | None:
    """Return the codes of a whole weight from `cached_weights()`; None if `b` is no weight, or no output is in FP8."""
    cache, value = current(), b if base_of(b) is None else base_of(b)
    weight = None if cache is None or "output" not in form.products else cache.weight_of(value)
    layouts = (value.shape, value.stride()), (value.shape[::-1], value.stride()[::-1])
    if cache is None or weight is None or (b.shape, b.stride()) not in layouts or value.dtype is not b.dtype:
        return None

    def packed(_: Tensor) -> Tensor:
        """Return the bytes of the codes and behind them those of the scales: the cache keeps one tensor."""
        lines = _cast(b, form, form.scaling == "blockwise", False, True)[1] or ()
        return torch.cat([each.reshape(-1).view(torch.uint8) for each in lines])

    held = cache.get(weight, ("fp8", form, b.stride()), packed, views=int(value is weight))
    count = b.numel()
    scale = held[count:].view(torch.float32)
    shape = {"tensorwise": (), "rowwise": (-1,), "blockwise": (-(-b.shape[1] // 128), -1)}[form.scaling]
    return CodedLines(held[:count].view(CODES[form.forward]).view(b.shape[::-1]), scale.view(shape))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, form: Format, weight: bool, of_a: bool, of_b: bool) -> Tensor:
        ctx.form, ctx.square = form, weight and form.scaling == "blockwise"
        output, input_gradient, weight_gradient = (
            each in form.products for each in ("output", "input_gradient", "weight_gradient")
        )
        one_scaling = not form.weight_tensorwise
        a_last, a_first = _cast(a, form, False, output, of_b and weight_gradient)
        b_last, b_first = _cast(b, form, ctx.square, of_a and input_gradient and one_scaling, output)
        # What the backward pass multiplies: codes with their scale, or where it has none of them, the matrix.
        kept_a = a_first or ((a, None) if of_b else (None, None))
        kept_b = b_last or ((b, None) if of_a else (None, None))
        ctx.save_for_backward(*kept_a, *kept_b)
        ctx.turned = b.stride(0) == 1
        return aten.matmul(a, b) if a_last is None or b_first is None else times(a_last, b_first, a.dtype, True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, scale_a, b, scale_b = ctx.saved_tensors
        form, of_a, of_b = ctx.form, None, None
        in_a, in_b = b is not None and "input_gradient" in form.products, scale_a is not None
        g_last, g_first = _cast(gradient, form, False, in_a, in_b, form.backward)
        if g_last is not None:
            whole = _cast(b, form, False, True, False, "", "tensorwise")[0] if scale_b is None else None
            of_a = times(g_last, whole or CodedLines(b, scale_b), gradient.dtype)
        elif b is not None:
            of_a = aten.matmul(gradient, b.t())
        if g_first is not None:
            # As the weight lies, so that its gradient need not be copied.
            kept = CodedLines(a, scale_a)
            of_b = times(g_first, kept, gradient.dtype).t() if ctx.turned else times(kept, g_first, gradient.dtype)
        elif a is not None:
            of_b = aten.matmul(gradient.t(), a).t() if ctx.turned else aten.matmul(a.t(), gradient)
        return of_a, of_b, None, None, None, None


def _cast(
    x: Tensor, form: Format, square: bool, last: bool, first: bool, name: str = "", scaling: str = ""
) -> tuple[CodedLines | None, CodedLines | None]:
    if not (last or first):
        return None, None
    return cast_both(x, name or form.forward, form, scaling or form.scaling, square, last, first)


def times(a: CodedLines, b: CodedLines, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Return ``a @ b.t()`` of the numbers that (I, S) and (J, S) stand for. fast: with sums of fewer bits."""
    scale_a, scale_b = a.scale, b.scale
    if scale_a.dim() == 2:
        types = [_BLOCKS if len(each.scale) == len(each.codes) else _SQUARES for each in (a, b)]
        scale_b = scale_b if types[1] == _BLOCKS else scale_b.t()
        kinds = [getattr(F.ScalingType, each) for each in types]
        return F.scaled_mm(a.codes, b.codes.t(), scale_a, kinds[0], scale_b, kinds[1], output_dtype=dtype)
    if scale_a.dim():
        scale_a, scale_b = scale_a[:, None], scale_b.expand(len(b.codes))[None].contiguous()
    return aten._scaled_mm(a.codes, b.codes.t(), scale_a, scale_b, None, None, dtype, fast)


_BLOCKS, _SQUARES = "BlockWise1x128", "BlockWise128x128"  # of torch.nn.functional.ScalingType


@functools.cache
def multiplies_blocks(device: torch.device) -> bool:
    """Return whether torch multiplies codes of 128 blocks there (sm_90, CUDA 12.9), by trying; it logs if not."""
    why = f"a GPU of capability {torch.cuda.get_device_capability(device)}"
    if torch.cuda.get_device_capability(device)[0] == 9:
        x = torch.linspace(-1, 1, 512 * 512, device=device, dtype=torch.bfloat16).view(512, 512)
        form = Format("blockwise", backward="e4m3")
        lines, squares = (_cast(x, form, square, True, False)[0] for square in (False, True))
        exact, why = x.float() @ x.float().t(), "wrong numbers"
        try:
            made = [times(lines, each, torch.bfloat16) for each in (lines, squares) if lines and each]
            if all(((each - exact).norm() < 0.1 * exact.norm()).item() for each in made):
                return True
        except (RuntimeError, ValueError, AttributeError) as error:
            why = str(error).splitlines()[0]
    logger.info("hmpx: blocks of 128 are decoded and multiplied in FP32 on %s: %s", device, why)
    return False
