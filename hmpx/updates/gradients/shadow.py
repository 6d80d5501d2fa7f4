"""The FP32 gradients of shadow parameters; writes of a step to them go back to the real gradients.

A step may set a gradient to None, replace it, or write to it. Afterwards the same is done to the gradient of the real
parameter, in its own dtype. A gradient that the step leaves alone is not touched.
"""

from __future__ import annotations

import torch

from hmpx.rounding.xla import is_lazy
from hmpx.updates.holding.memory_order import laid_as
from hmpx.updates.ranks.sharding import is_sharded, local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class ShadowGradients:
    """The gradients of whole shadows; under `torch.no_grad()`."""

    def __init__(self, one_layout: bool) -> None:
        self._one_layout = one_layout
        self._shown: dict[Parameter, tuple[Tensor | None, int]] = {}
        self._before: dict[Parameter, tuple[Tensor | None, Tensor | None]] = {}

    def show(self, p: Parameter, q: Parameter) -> None:
        """Give the shadow `q` an FP32 copy of the gradient of `p`."""
        if p.grad is None:
            q.grad = None
        elif self._one_layout and p.grad.layout is torch.strided and not is_sharded(p.grad):
            q.grad = laid_as(p.grad.detach(), q, torch.float32)
        else:
            q.grad = p.grad.detach().to(torch.float32, copy=True)
        self._shown[p] = q.grad, _version(q.grad)

    def keep(self, p: Parameter) -> None:
        """Before a write to the gradient of `p`: keep a copy for `undo`."""
        if p not in self._before:
            self._before[p] = p.grad, None if p.grad is None else p.grad.detach().clone()

    def hand_back(self, p: Parameter, q: Parameter) -> None:
        """Give the gradient of `p` the changes that the step made to the gradient of `q`."""
        shown, version = self._shown[p]
        left = q.grad
        if left is shown and (left is None or _is_as_shown(p.grad, left, version)):
            return
        self.keep(p)
        if left is not None and left is shown and p.grad is not None and can_be_written(p.grad):
            p.grad.copy_(left)
        else:
            p.grad = None if left is None else left.detach().to(_gradient_dtype(p), copy=True)

    def undo(self) -> None:
        """Restore every gradient, object and values, after the step raised."""
        for p, (grad, values) in self._before.items():
            p.grad = grad
            if grad is not None and values is not None and grad.layout is torch.strided and can_be_written(grad):
                grad.copy_(values)


def can_be_written(grad: Tensor) -> bool:
    """Whether each element has its own memory, unlike in an expanded gradient."""
    return all(size < 2 or stride for size, stride in zip(grad.shape, local(grad).stride(), strict=True))


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else grad._version


def _is_as_shown(real: Tensor | None, left: Tensor, version: int) -> bool:
    """Whether a gradient is unchanged, by value too: a write through `.data` or by a fused kernel has no version."""
    if left._version != version or real is None:
        return False
    if is_lazy(left) or left.layout is not torch.strided:
        return True
    return torch.equal(local(left).to(real.dtype), local(real))


def _gradient_dtype(p: Parameter) -> torch.dtype:
    return p.grad.dtype if p.grad is not None else getattr(p, "grad_dtype", None) or p.dtype
