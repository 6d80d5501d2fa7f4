"""What computes an op in the fp8 list: FP8 products where they fit, and else torch's own kernel in low precision.

**What a caller sees** is a BF16 op: inputs in BF16, the result and the gradients in BF16. Everything else runs in
torch's own kernel, and whoever watches is told why: sizes that FP8 hardware does not take, vectors, tensor subclasses,
sparse and nested tensors, forward-mode AD, ``out=``. In-place ops and calls in `disable_casts()` never come here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from hmpx.compiling import ask_once, never_compile_alone
from hmpx.ops.fp8.format import BLOCK, FORMATS, SMALL, Format
from hmpx.ops.fp8.operands import OPERANDS, Operands, is_dense, multiplied
from hmpx.ops.fp8.product import How, product, watching
from hmpx.ops.wrapping.overriding import call
from hmpx.ops.wrapping.rules import is_stated

Tensor = torch.Tensor


@dataclass(frozen=True)
class Fp8Kernel:
    """FP8 products of one format.

    by: what multiplies codes on a CPU, "bfloat16", "float32" or, as a reference, "scaled_mm". A GPU that has FP8 tensor
    cores uses them through scaled_mm.
    """

    format: Format
    by: str = "bfloat16"
    inputs = frozenset({torch.bfloat16})

    @property
    def backward(self) -> str:
        """What the backward pass computes in, in words."""
        low = [name.replace("_", " of the ") for name in ("input_gradient", "weight_gradient")
               if name not in self.format.products]  # fmt: skip
        return f"FP8 too{', but for ' + ' and '.join(low) if low else ''}"

    def __str__(self) -> str:
        if self.by == "scaled_mm" and self.format.scaling not in BLOCK:
            return f"FP8 {self.format}, scaled_mm"
        wide = "FP32" if self.by == "float32" or not self.format.exact_in_bf16 else "BF16"
        return f"FP8 {self.format}, on CPU multiplied in {wide}"

    def wrap(self, op: str, function: Callable) -> Callable:
        """`function`, which is torch's own for the op, in FP8 where that fits."""
        return _computing(function, OPERANDS[op], function.__name__ == "__rmatmul__", self)


def _computing(op: Callable, operands: Callable[..., Operands | str], swapped: bool, kernel: Fp8Kernel) -> Callable:
    def computed(*args: Any, **kwargs: Any) -> Any:
        found: Operands | str = "out= or dtype="
        if not (kwargs and is_stated(kwargs)):
            try:
                found = operands(*reversed(args)) if swapped else operands(*args, **kwargs)
            except (TypeError, ValueError, AttributeError):  # no legal call, or one of torch's old ones
                return call(op, args, kwargs)
        why_not = found if isinstance(found, str) else _why_not(found, kernel.format)
        if (watcher := watching()) is not None:
            watcher.note(why_not)
        if why_not or isinstance(found, str):
            return call(op, args, kwargs)
        product = _multiply(found.a, found.b, kernel)
        return product if found.finish is None else found.finish(product)

    vars(computed)["hands_on"] = op
    return computed


def _why_not(operands: Operands, form: Format) -> str:
    """Why a product stays in low precision; nothing where it does not."""
    a, b, _ = operands
    for each in (a, b):
        if not is_dense(each):
            return "a tensor subclass, sparse or nested"
        if each.dtype is not torch.bfloat16:
            return "not of BF16"
        if each.device.type not in ("cpu", "cuda", "meta"):
            return f"no FP8 on {each.device.type}"
        if each.dim() < 2:
            return "a product with a vector"
    k, n = b.shape[-2:]
    if k % form.multiple or n % form.multiple or not a.numel():
        return f"{k} x {n} are no multiples of {form.multiple}, which hardware wants"
    if form.auto_filter and any(k <= (most_k or k) and n <= (most_n or n) for most_k, most_n in SMALL[form.scaling]):
        return f"{k} x {n} is too small to gain, by torchao's filter"
    if not is_dynamo_compiling() and forward_ad._current_level >= 0:
        return "forward-mode AD"
    return ""


def _multiply(a: Tensor, b: Tensor, kernel: Fp8Kernel) -> Tensor:
    by = kernel.by if a.is_cpu else "scaled_mm" if a.is_cuda and _has_scaled_mm(a.device) else "bfloat16"
    return multiplied(a, b, product, How(kernel.format, by, b.dim() == 2))


@functools.cache
def _has_scaled_mm(device: torch.device) -> bool:
    """Whether a GPU has FP8 tensor cores: NVIDIA's from sm_89 on."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


ask_once(_has_scaled_mm)
_any = _computing(torch.matmul, OPERANDS["matmul"], False, Fp8Kernel(FORMATS["tensorwise"]))
COMPUTED = _any.__code__  # one for all of them
never_compile_alone(_any)
