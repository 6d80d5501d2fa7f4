"""Gradients in low precision: their sums over several backward passes, and how a GradScaler scales those in FP16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent
from hmpx.insight.doctor.notes import Notes, OpCall
from hmpx.insight.doctor.op_watch import FEW, few
from hmpx.insight.doctor.twin import sample
from hmpx.insight.tensors import Tensor

_SETTLED = 5  # calls of a GradScaler after which it should have found its scale


class Sums:
    """Adds up in FP32 what backward passes add to gradients in low precision."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # by the place of a gradient
        self._off: dict[int, tuple[float, float]] = {}  # squares: of what is off there, and of the sum
        self._added: Counter[int] = Counter()
        self._error = self._size = 0.0  # the same of all steps
        self._most = 0  # backward passes before a step
        self._dtype: torch.dtype | None = None

    def look(self, notes: Notes, op: OpCall) -> None:
        if op.name == "add_" and op.before and op.node and "AccumulateGrad" in op.node.name() and len(op.given) > 1:
            grad, key = op.given[0], op.given[0].data_ptr()
            now, more = few(grad).float(), few(op.given[1]).float()
            total = self._sums[key] = self._sums.get(key, op.before[0].float()) + more
            self._off[key] = float((now - total).square().sum()), float(total.square().sum())
            self._dtype = grad.dtype
            self._added[key] += 1

    def stepped(self) -> None:
        """Count what the gradients of a step were off by, before they were clipped."""
        self._most = max([self._most, *(1 + count for count in self._added.values())])
        self._error += sum(error for error, _ in self._off.values())
        self._size += sum(size for _, size in self._off.values())
        self._sums.clear()
        self._off.clear()
        self._added.clear()

    def problems(self, notes: Notes, names: Names) -> Iterator[Problem]:
        if self._size and self._dtype is not None:
            error = (self._error / self._size) ** 0.5
            said = f"gradients of {self._most} backward passes are accumulated in {dtype_name(self._dtype)}, and are "
            said += f"off by {percent(error)}"
            do, recipe = "accumulate in float32: use_fp32_grad_acc in hmpx.attach", {"use_fp32_grad_acc": True}
            wrong, weight = error > 0.01, min(0.2 + error, 0.8)
            yield Problem("gradient accumulation", wrong, said, do, weight=weight, recipe=recipe)


def look_at_scale(notes: Notes, op: OpCall) -> None:
    """Count the gradients that FP16 cannot hold."""
    for result in op.results if op.stage == "backward" else ():
        if result.dtype is torch.float16 and result.numel() > 1:
            few = sample(result, FEW).float().abs()
            tiny = (few > 0) & (few < torch.finfo(torch.float16).smallest_normal)
            notes.note("gradient in FP16", op, nonzero=int((few > 0).sum()), tiny=int(tiny.sum()))


def of_scale(notes: Notes, names: Names) -> Iterator[Problem]:
    recipe = {"parameter_dtype": "float32"} if any(p.dtype is torch.float16 for p in names) else {}
    spots, late = notes.spots("gradient in FP16"), notes.skipped[len(notes.skipped) // 2 :]
    nonzero = sum(spot.numbers["nonzero"] for spot in spots)
    if nonzero and not notes.skipped:
        share = sum(spot.numbers["tiny"] for spot in spots) / nonzero
        said = f"FP16 without a GradScaler: {percent(share)} of the nonzero gradients are below its normal numbers"
        do, weight = 'torch.amp.GradScaler("cuda"), or BF16, which needs none', 0.3 + 0.5 * share
        yield Problem("loss scaling", share > 0.01, said, do, weight=weight, recipe=recipe)
    if len(late) >= _SETTLED and 2 * sum(late) >= len(late):
        said = f"GradScaler has skipped {sum(late)} of the last {len(late)} steps, down to a scale of {notes.scale:g}: "
        said += "gradients are inf or NaN at any scale"
        do = "look for the first op that makes them (doctor --at 3), or use BF16, which needs no scale"
        yield Problem("GradScaler", True, said, do, weight=0.9, recipe=recipe)
