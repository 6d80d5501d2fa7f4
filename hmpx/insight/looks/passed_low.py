"""Whether FP32 weights pass through low precision between two steps: a checkpoint that is loaded, a sum over workers.

All numbers of a weight are then suddenly those of BF16 or FP16, and what the steps since the last such time have moved
is rounded to these. *kept* is how far the weights have come of that way, as for steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hmpx.base.tensors import dtype_name
from hmpx.insight.dispatch import Look
from hmpx.insight.finding import Finding, Names, percent, some
from hmpx.insight.looks.steps import window_of
from hmpx.insight.looks.updates import LIMIT
from hmpx.insight.notes import Notes
from hmpx.insight.report import number
from hmpx.insight.tensors import has_numbers, low_dtype, sample
from hmpx.updates.ranks.sharding import local
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_MOST, _ENOUGH = 4, 16  # parameters of an optimizer that are looked at, the largest; and how many numbers tell


@dataclass
class _Weights:
    """Some weights of one optimizer. last: samples of what a step has left. base: of what they were rounded to."""

    params: list[Parameter]
    where: str
    steps: int = 0
    last: torch.Tensor | None = None
    base: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    rounded: list[int] = field(default_factory=list)  # the steps before which they were
    dot: float = 0.0
    size: float = 0.0

    @property
    def is_due(self) -> bool:
        return bool(window_of(self.steps + 1)) or all(p.is_cpu for p in self.params)

    def now(self) -> torch.Tensor:
        return torch.cat([sample(p, 64) for p in self.params])


class PassedLow(Look):
    """Looks at some FP32 weights as a step begins and as it ends. On a device it does so in windows of steps alone."""

    def __init__(self) -> None:
        self._seen: dict[int, _Weights] = {}

    def met(self, optimizer: torch.optim.Optimizer, where: str) -> None:
        wide = [p for p in parameters(optimizer) if p.dtype is torch.float32 and p.requires_grad and has_numbers(p)]
        wide = [p for p in wide if local(p).numel() >= _ENOUGH and local(p).layout is torch.strided]
        if wide:
            self._seen[id(optimizer)] = _Weights(sorted(wide, key=lambda p: -p.numel())[:_MOST], where)

    def begin(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        seen = self._seen.get(id(optimizer))
        if seen is None or not seen.is_due:
            return
        now = seen.now()
        dtype = low_dtype(now)
        if not seen.steps and dtype is not None:  # a leg of its own goes on from weights that were here
            for each in self._seen.values():
                is_same = [*map(id, each.params)] == [*map(id, seen.params)]
                if each.last is not None and (is_same or torch.equal(each.last.to(dtype).float(), now)):
                    seen.last, seen.base = each.last, each.base
        seen.base = now if seen.base is None else seen.base
        if seen.last is not None and low_dtype(seen.last) is None and dtype is not None:
            way, real = seen.last - seen.base, seen.last.to(dtype).float() - seen.base
            seen.dot, seen.size = seen.dot + float(way @ real), seen.size + float(way @ way)
            seen.rounded.append(seen.steps + 1)
            seen.base, seen.dtype = now, dtype

    def end(self, optimizer: torch.optim.Optimizer, evaluations: int) -> None:
        if (seen := self._seen.get(id(optimizer))) is not None:
            seen.steps += 1
            seen.last = seen.now() if seen.is_due else None

    def findings(self, notes: Notes, names: Names) -> Iterator[Finding]:
        for seen in self._seen.values():
            if not seen.rounded or seen.dtype is None:
                continue
            kept, dtype = min(max(seen.dot / (seen.size or 1.0), 0.0), 1.0), dtype_name(seen.dtype)
            told = tuple(names[p] for p in seen.params if p in names)
            said = f"float32 weights ({some(told)}) hold numbers of {dtype} alone before step {seen.rounded[0]}"
            said += f" and {number(len(seen.rounded) - 1, 'later one')}" if seen.rounded[1:] else ""
            said += f", as they did not after the step before: they keep {percent(kept)} of the way that they had gone"
            do, wrong = "copy, save and average weights in float32", kept < LIMIT
            yield Finding("rounded between steps", wrong, said, do, seen.where, told, weight=0.8 if wrong else 0.1)
