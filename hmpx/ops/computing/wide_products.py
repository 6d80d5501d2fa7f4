"""Products of BF16 whose result stays in FP32: what a module that is under "bf16-to-fp32" multiplies with.

**The maths.** The product of two BF16 numbers is exact in FP32. A GPU's BF16 product sums in FP32 and rounds at the
end; with ``out_dtype=torch.float32`` it leaves that rounding out, at the speed of BF16. Elsewhere the FP32 product of
the same numbers is the same but for the order of the sum, and slower. The gradient of the result is rounded to BF16,
and the gradients of the inputs are BF16 products of it, as of a BF16 product whose result somebody casts up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling

from hmpx.compiling import never_compile_alone
from hmpx.ops.fp8.operands import OPERANDS, Operands, is_dense, multiplied
from hmpx.ops.wrapping.overriding import call
from hmpx.ops.wrapping.rules import cast, is_stated

Tensor = torch.Tensor
aten = torch.ops.aten


@dataclass(frozen=True)
class WideKernel:
    """BF16 products with FP32 results. What they do not fit is an FP32 product of the same BF16 inputs."""

    inputs = frozenset({torch.bfloat16})
    backward = "BF16 products"

    def __str__(self) -> str:
        return "BF16 products with FP32 results"

    def wrap(self, op: str, function: Callable) -> Callable:
        """`function`, which is torch's own for the op, with its result in FP32."""
        return _computing(function, OPERANDS[op], function.__name__ == "__rmatmul__")


def _computing(op: Callable, operands: Callable[..., Operands | str], swapped: bool) -> Callable:
    def computed(*args: Any, **kwargs: Any) -> Any:
        if kwargs and is_stated(kwargs):
            return call(op, args, kwargs)
        try:
            found = operands(*reversed(args)) if swapped else operands(*args, **kwargs)
        except (TypeError, ValueError, AttributeError):  # no legal call, or one of torch's old ones
            found = "no call that is known"
        if isinstance(found, str) or not _fits(found):
            return call(op, cast(args, torch.float32), cast(kwargs, torch.float32))
        product = multiplied(found.a, found.b, _Product.apply)
        return product if found.finish is None else found.finish(product)

    vars(computed)["hands_on"] = op
    return computed


def _fits(operands: Operands) -> bool:
    if not is_dynamo_compiling() and forward_ad._current_level >= 0:
        return False
    return all(is_dense(each) and each.dtype is torch.bfloat16 and each.dim() > 1 for each in operands[:2])


class _Product(torch.autograd.Function):
    """``a @ b`` in FP32, of BF16 (M, K) and (K, N) or (B, M, K) and (B, K, N), with BF16 gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        if a.is_cuda and torch.version.hip is None:
            return (aten.mm if a.dim() == 2 else aten.bmm).dtype(a, b, torch.float32)
        return aten.matmul(aten.to.dtype(a, torch.float32), aten.to.dtype(b, torch.float32))

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


_any = _computing(torch.matmul, OPERANDS["matmul"], False)
COMPUTED = _any.__code__  # one for all of them
never_compile_alone(_any)
