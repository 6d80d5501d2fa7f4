"""Matrix products of hmpx, in the place of torch's: in FP8, and of BF16 with results in FP32.

Each op that is a matrix product is taken apart into ``finish(a @ b)`` (`OPERANDS`); a kernel computes ``a @ b``.

**FP8**, and FP4 (`fp8_kernel`). One sees a BF16 op: inputs, result and gradients in BF16. Calls that do not fit run in
torch's own kernel, and `record` is told why: sizes that FP8 hardware does not take, vectors, tensor subclasses, sparse
and nested tensors, forward-mode AD, ``out=``. In-place ops and calls in `disable_casts()` never come here.

**BF16 with results in FP32** (`wide_kernel`), for a module under "bf16-to-fp32". The product of two BF16 numbers is
exact in FP32. A GPU's BF16 product sums in FP32 and rounds at the end; with ``out_dtype=torch.float32`` it leaves
that rounding out, at the speed of BF16. Elsewhere the FP32 product of the same numbers is the same except for the order
of the sum, and slower. The gradient of the result is rounded to BF16, and the gradients of the inputs are BF16 products
of it, as of a BF16 product whose result somebody casts up.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from hmpx.base import run_in_region
from hmpx.base.compiling import ask_once
from hmpx.base.torch_private import FakeTensor, private
from hmpx.ops.computing import fp8_gpu
from hmpx.ops.computing.fp8_product import GroupedProduct, How, product, watching, why_not_grouped, wide_product
from hmpx.ops.policies.composition import einsum_labels
from hmpx.ops.policies.fp8_format import BLOCK_OF, PRODUCTS, SMALL, Format
from hmpx.ops.wrapping.overriding import PLAIN, Kernel, call, may_override, stand_in
from hmpx.ops.wrapping.rules import cast, is_stated

Tensor = torch.Tensor
aten = torch.ops.aten
logger = logging.getLogger("hmpx")


# The operands of each op


class Operands(NamedTuple):
    """a: (..., M, K). b: (K, N), which is then the weight, or (..., K, N). finish: makes the op's result of a @ b.

    offs: of a grouped product, the ends of groups among the rows of `a`, each of which has one matrix of `b`.
    """

    a: Tensor
    b: Tensor
    finish: Callable[[Tensor], Tensor] | None = None
    offs: Tensor | None = None


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Operands:
    if bias is None:
        return Operands(input, weight.t())
    return Operands(input, weight.t(), lambda product: aten.add(product, bias))


def _matmul(input: Tensor, other: Tensor) -> Operands:
    return Operands(input, other)


def _mm(input: Tensor, mat2: Tensor) -> Operands:
    return Operands(input, mat2)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Operands:
    if beta == 0:  # then nothing in `input` counts, NaN neither
        return Operands(mat1, mat2, lambda product: aten.mul(product, alpha))
    scaled = input if beta == 1 else aten.mul(input, beta)
    return Operands(mat1, mat2, lambda product: aten.add(scaled, product, alpha=alpha))


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Operands:
    return _addmm(input, batch1, batch2, beta=beta, alpha=alpha)


def _grouped_mm(
    input: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Operands | str:
    if offs is None or bias is not None or out_dtype not in (None, torch.bfloat16):
        return "a grouped product without offs, or with a bias or another out_dtype"
    return Operands(input, mat2, None, offs)


def _einsum(equation: str, operands: Any, *, path: Any = None) -> Operands | str:
    """Take two operands apart: labels of both and the result are a batch, labels of both alone are summed over."""
    if len(operands) != 2:
        return f"einsum of {len(operands)} operands"
    left, right = operands
    (of_left, of_right), result = einsum_labels(equation, operands)
    if "." in equation or any(len(set(term)) < len(term) for term in (of_left, of_right)):
        return "einsum with ... or a diagonal"
    shared = [label for label in of_left if label in of_right]
    batch, summed = ([each for each in shared if (each in result) is kept] for kept in (True, False))
    rows, columns = ([each for each in term if each not in shared] for term in (of_left, of_right))
    sizes = dict(zip(of_left, left.shape, strict=True))
    for label, size in zip(of_right, right.shape, strict=True):
        if sizes.setdefault(label, size) != size:
            return "einsum that broadcasts"
    if any(label not in result for label in (*rows, *columns)):
        return "einsum that sums one operand"

    def number(labels: list[str]) -> int:
        return math.prod(sizes[label] for label in labels)

    a = left.permute([of_left.index(label) for label in (*batch, *rows, *summed)])
    b = right.permute([of_right.index(label) for label in (*batch, *summed, *columns)])
    stacks = [number(batch)] if batch else []
    made = [*batch, *rows, *columns]

    def finish(product: Tensor) -> Tensor:
        spread = product.reshape([sizes[label] for label in made])
        return spread.permute([made.index(label) for label in result])

    return Operands(
        a.reshape([*stacks, number(rows), number(summed)]),
        b.reshape([*stacks, number(summed), number(columns)]),
        finish,
    )


# As torch compiles:
_TRACED = FakeTensor, private("torch._subclasses.functional_tensor.FunctionalTensor")

OPERANDS: dict[str, Callable[..., Operands | str]] = {
    "linear": _linear, "matmul": _matmul, "linalg_matmul": _matmul, "mm": _mm, "bmm": _mm, "addmm": _addmm,
    "baddbmm": _baddbmm, "einsum": _einsum, "grouped_mm": _grouped_mm,
}  # fmt: skip


def _computing(
    name: str,
    op: Callable,
    refuse: Callable[[Operands | str], str],
    multiply: Callable[..., Tensor],
    instead: Callable[[tuple, dict], Any],
) -> Callable:
    """Return `op` with `multiply` for its product of two matrices, or of two stacks of them.

    refuse: says why `multiply` does not fit; `instead` computes the op then.
    """
    operands, swapped = OPERANDS[name], op.__name__ == "__rmatmul__"

    @stand_in(op)
    def computed(*args: Any, **kwargs: Any) -> Any:
        found: Operands | str = "out= or dtype="
        plain = all(map(_is_plain, (*args, *kwargs.values())))
        if not plain:  # it may know the op, and no transpose
            found = "a tensor subclass, sparse or nested"
        elif not (kwargs and is_stated(kwargs)):
            try:
                found = operands(*reversed(args)) if swapped else operands(*args, **kwargs)
            except (TypeError, ValueError, AttributeError):  # no legal call, or one of torch's old ones
                found = "a call of an old form"
        if refuse(found) or isinstance(found, str):
            # What the class of a tensor calls in turn is a part of this op.
            return instead(args, kwargs) if plain else run_in_region.run_uncast(instead, (args, kwargs), {})
        if found.offs is not None:
            return multiply(found.a, found.b, found.offs)
        made = _multiplied(found.a, found.b, multiply)
        return made if found.finish is None else found.finish(made)

    return computed


def _is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor of torch's own classes, or none; of a list, whether its items are."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if not isinstance(value, Tensor):
        return not may_override(value)
    is_known = type(value) in PLAIN or isinstance(value, _TRACED)
    return is_known and value.layout is torch.strided and not value.is_nested


def _multiplied(a: Tensor, b: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if b.dim() == 2:
        rows = multiply(a.reshape(-1, a.shape[-1]), b)
        return rows.reshape(*a.shape[:-1], b.shape[-1])
    stacks = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    flat = [each.expand(*stacks, *each.shape[-2:]).reshape(-1, *each.shape[-2:]) for each in (a, b)]
    return multiply(*flat).reshape(*stacks, a.shape[-2], b.shape[-1])


def _why_not(operands: Operands | str) -> str:
    """Return why no product of hmpx computes this; an empty string if one does."""
    if isinstance(operands, str):
        return operands
    for each in operands[:2]:
        if each.dtype is not torch.bfloat16:
            return "not of BF16"
        if each.dim() < 2:
            return "a product with a vector"
    if is_dynamo_compiling() or all(forward_ad.unpack_dual(each).tangent is None for each in operands[:2]):
        return ""
    return "forward-mode AD"


# FP8


def fp8_kernel(form: Format, on_cpu: str = "bfloat16") -> Kernel:
    """Return the FP8 products of one format.

    on_cpu: how codes are multiplied there, "bfloat16", "float32" or, as a reference, "scaled_mm". A GPU that has FP8
    tensor cores uses them, through kernels that cast (`fp8_gpu`); an older one multiplies codes in BF16, and says so.
    """
    kept = [each.replace("_", " of the ") for each in PRODUCTS[1:] if each not in form.products]
    backward = f"{form.bits} too{', but for ' + ' and '.join(kept) if kept else ''}"
    if on_cpu == "scaled_mm" and form.scaling not in BLOCK_OF:
        multiplied = "scaled_mm"
    else:
        in_bf16 = on_cpu != "float32" and (form.scaling == "tensorwise" or form.exact_scales)
        multiplied = f"on CPU multiplied in {'BF16' if in_bf16 else 'FP32'}"

    def refuse(operands: Operands | str) -> str:
        why_not = _why_not_fp8(operands, form)
        if (watcher := watching()) is not None:
            watcher.note(why_not)
        return why_not

    def multiply(a: Tensor, b: Tensor, offs: Tensor | None = None) -> Tensor:
        by, weight = on_cpu, b.dim() == 2
        if a.is_cuda:
            by = "scaled_mm" if _has_scaled_mm(a.device) else "bfloat16"
        if offs is not None:
            return GroupedProduct.apply(a, b, offs, How(form, "bfloat16", weight=True))
        if a.is_cuda and weight and by == "scaled_mm" and watching() is None and fp8_gpu.fits(a, b, form):
            return fp8_gpu.product_of_both(a, b, form, weight)
        return product(a, b, How(form, by, weight))

    def wrap(op: str, function: Callable) -> Callable:
        return _computing(op, function, refuse, multiply, lambda args, kwargs: call(function, args, kwargs))

    return Kernel(f"{form.bits} {form}, {multiplied}", backward, wrap)


def _why_not_fp8(operands: Operands | str, form: Format) -> str:
    why_not = _why_not(operands)
    if why_not or isinstance(operands, str):
        return why_not
    a, b, _, offs = operands
    if offs is not None and (why_not := why_not_grouped(a, b, form)):
        return why_not
    k, n = b.shape[-2:]
    if a.device.type not in ("cpu", "cuda", "meta"):
        return f"no FP8 on {a.device.type}"
    if k % form.multiple or n % form.multiple or not (a.numel() and b.numel()):
        return f"{k} x {n} are no multiples of {form.multiple}, which hardware wants"
    if form.auto_filter and any(k <= (most_k or k) and n <= (most_n or n) for most_k, most_n in SMALL[form.scaling]):
        return f"{k} x {n} is too small to gain, by torchao's filter"
    return ""


def _has_scaled_mm(device: torch.device) -> bool:
    """Return whether a GPU has FP8 tensor cores: NVIDIA's from sm_89 on. It logs where one has not."""
    return _asked_scaled_mm(device)  # a constant in compiled code, where Dynamo warns of a cache


@functools.cache
def _asked_scaled_mm(device: torch.device) -> bool:
    has = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
    if not has:
        logger.info("hmpx: %s (%s) has no FP8 tensor cores that torch uses: FP8 codes are multiplied in BF16, which is "
                    "slower than BF16 alone", device, torch.cuda.get_device_name(device))  # fmt: skip
    return has


ask_once(_has_scaled_mm)


# BF16 with results in FP32


def wide_kernel() -> Kernel:
    """Return BF16 products with FP32 results. A call that does not fit is an FP32 product of the same BF16 inputs."""

    def refuse(operands: Operands | str) -> str:
        return _why_not(operands) or ("" if operands[3] is None else "a grouped product")

    def wrap(op: str, function: Callable) -> Callable:
        def instead(args: tuple, kwargs: dict) -> Any:
            if is_stated(kwargs):
                return call(function, args, kwargs)
            return call(function, cast(args, torch.float32), cast(kwargs, torch.float32))

        return _computing(op, function, refuse, _WideProduct.apply, instead)

    return Kernel("BF16 products with FP32 results", "BF16 products", wrap)


class _WideProduct(torch.autograd.Function):
    """``a @ b`` in FP32, of BF16 (M, K) and (K, N) or (B, M, K) and (B, K, N), with BF16 gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return wide_product(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        low = aten.to.dtype(gradient, a.dtype)
        of_a = aten.matmul(low, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        of_b = aten.matmul(a.transpose(-1, -2), low) if ctx.needs_input_grad[1] else None
        return of_a, of_b
