"""Gradients in low precision: what accumulating them rounds away, and how many are too small for FP16."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from hmpx.insight.doctor.twin import sample
from hmpx.insight.tensors import LOW, Tensor

_FEW = 256
_LEAST = 2.0**-14  # of FP16's normal numbers
_ACCUMULATES = "torch::autograd::AccumulateGrad"


class Accumulation:
    """Adds up in FP32 what backward passes add to gradients in BF16 or FP16.

    error, size: sums of squares, of what is off and of the gradients. most: backward passes before a step.
    """

    def __init__(self) -> None:
        self.error = self.size = 0.0
        self.most = 0
        self.dtype: torch.dtype | None = None
        self._sums: dict[int, Tensor] = {}
        self._added: Counter[int] = Counter()

    def look(self, name: str, node: Any, args: tuple, given: list[Tensor], before: list[Tensor] | None) -> None:
        """One op of a backward pass."""
        if name != "add_" or before is None or node.name() != _ACCUMULATES or len(given) < 2:
            return
        key = given[0].data_ptr()
        self._sums[key] = self._sums.get(key, before[0].float()) + sample(given[1], _FEW).float()
        self._added[key] += 1

    def compare(self, params: list[torch.nn.Parameter]) -> None:
        """A step has taken the gradients, which are still there."""
        for p in params:
            total = None if p.grad is None else self._sums.get(p.grad.data_ptr())
            if p.grad is None or total is None or p.grad.dtype not in LOW:
                continue
            self.dtype = p.grad.dtype
            self.most = max(self.most, self._added[p.grad.data_ptr()] + 1)
            self.error += float((sample(p.grad, _FEW).float() - total).square().sum())
            self.size += float(total.square().sum())
        self._sums.clear()
        self._added.clear()


class Underflow:
    """Counts results of a backward pass in FP16, and those beneath its normal numbers."""

    def __init__(self) -> None:
        self.values = self.tiny = 0

    def look(self, results: list[Tensor]) -> None:
        """One op of a backward pass."""
        for result in results:
            if result.dtype is torch.float16 and result.numel() > 1:
                few = sample(result, _FEW).float().abs()
                self.values += int((few > 0).sum())
                self.tiny += int(((few > 0) & (few < _LEAST)).sum())
