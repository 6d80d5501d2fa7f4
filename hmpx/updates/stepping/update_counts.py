"""Counts the updates that round-to-nearest would lose, where a step writes weights back.

A step reads a weight, computes in FP32 and writes the result back. A watched step copies the old weight
(`before_step`) and compares it with the FP32 result and with the written weight (`UpdateCounts.compare`). Only counts
are kept, as int64 on the parameter's device: they do not depend on how a parameter is cut, and no step waits for the
device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from hmpx.updates.holding.segment import Segment
from hmpx.updates.ranks.sharding import local

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

ULP = 1 << 16  # `error`, `bias` and `size` are counted in this fraction of a unit in BF16's last place: FP32's own one
_EXPONENT = 0x7F800000  # the bits of an FP32 exponent


class Totals(NamedTuple):
    """Sums over the elements and the steps of one parameter; in this order in the tensors of counts."""

    updates: int = 0  # FP32 results that are finite and not the weight as it stood; the next five are of these
    lost: int = 0  # which round-to-nearest would have lost
    moved: int = 0  # after which the BF16 weight is another one
    error: int = 0  # |BF16 weight - FP32 result|
    bias: int = 0  # BF16 weight - FP32 result
    size: int = 0  # |FP32 result - weight as it stood|
    nonfinite: int = 0  # FP32 results that are inf or NaN
    no_gradient: int = 0  # steps in which there was none
    zero_gradient: int = 0  # steps in which all of it was zero


_UPDATES, _MOVED = Totals._fields.index("updates"), Totals._fields.index("moved")
_NO_GRADIENT, _ZERO_GRADIENT = Totals._fields.index("no_gradient"), Totals._fields.index("zero_gradient")


def count(old: Tensor, weight: Tensor, x: Tensor, written: Tensor) -> Tensor:
    """Compare one write-back element by element.

    Args:
        old: the FP32 value before the step: the master, or the BF16 weight.
        weight, written: the BF16 weight before and after.
        x: the FP32 result of the step.

    Returns:
        int64 [7], the first seven of `Totals`. What nearest would lose is counted for a BF16 weight without a
        master: it would have got the same update.
    """
    finite = x * 0 == 0
    updated = (x != old) & finite
    update, before = x - old, weight.float()
    lost = ((before + update).bfloat16().float() == before) & updated
    moved = (written.float() != before) & updated
    off = _places_between(x, written) * updated
    size = (update.abs_() / _power_of_two(torch.maximum(x.abs(), old.abs())) * (2**7 * ULP)).int() * updated
    counts = (updated.count_nonzero(), lost.count_nonzero(), moved.count_nonzero())
    return torch.stack([*counts, off.abs().sum(), off.sum(), size.sum(), x.numel() - finite.count_nonzero()])


def _places_between(x: Tensor, rounded: Tensor) -> Tensor:
    """Count the FP32 numbers from `x` up to the BF16 number that it was rounded to, which has its sign.

    The bits of FP32 numbers of one sign count them, and those of BF16 numbers are their upper half.
    """
    bits = x.view(torch.int32)
    away_from_zero = (rounded.view(torch.int16).int() << 16) - bits
    sign = bits >> 31  # 0 or -1, all ones: y ^ -1 is -y - 1
    return (away_from_zero ^ sign) - sign


def _power_of_two(magnitude: Tensor) -> Tensor:
    """Return the largest power of two up to a number; BF16's unit follows it from the smallest normal one on."""
    return (magnitude.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=2.0**-126)


class UpdateCounts:
    """The counts of one optimizer's BF16 parameters, by name, over the steps that went through.

    A step is `begin`, write-backs in any number of parts, `end`. One that raises never gets to `end`, and its counts
    are dropped when the next one begins.

    Attributes:
        is_open: whether steps are counted.
        steps: how many were.
        elements: by parameter, how many this rank holds.
    """

    def __init__(self) -> None:
        self.is_open = True
        self.steps = 0
        self.elements: dict[str, int] = {}
        self._totals: dict[str, Tensor] = {}
        self._last_move: dict[str, Tensor] = {}  # the number of the step, from 1
        self._of_step: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._of_step.clear()

    def compare(self, before: OldValues, x: Tensor) -> None:
        """Count the updates of a segment. x: the step's FP32 result."""
        segment, p = before.segment, before.segment.param
        counts = count(before.old, before.weight, x, segment.of(p))
        of_step = self._of_step.setdefault(segment.name, counts.new_zeros(len(Totals._fields)))
        of_step[: len(counts)] += counts
        if segment.offset == 0:  # once a parameter
            grad = before.grad if p.grad is None else p.grad  # a closure gives it later; a step may take it away
            of_step[_NO_GRADIENT] = grad is None
            if grad is not None and segment.count:
                of_step[_ZERO_GRADIENT] = ~_values(grad).any()

    def end(self, params: Iterable[tuple[str, Parameter]]) -> None:
        """End a step that went through. `params`: the BF16 parameters of the optimizer, with their names."""
        self.steps += 1
        for name, p in params:
            self.elements[name] = local(p).numel()
            of_step = self._of_step.get(name)
            if of_step is None:  # not stepped
                of_step = torch.zeros(len(Totals._fields), dtype=torch.int64, device=p.device)
                of_step[_NO_GRADIENT] = 1
            else:  # an optimizer may have given itself a gradient, and taken it away again
                of_step[_NO_GRADIENT] *= of_step[_UPDATES] == 0
            moved = torch.where(of_step[_MOVED] > 0, self.steps, 0)
            if name in self._totals:
                of_step += self._totals[name].to(p.device)
                moved = torch.maximum(moved, self._last_move[name].to(p.device))
            self._totals[name], self._last_move[name] = of_step, moved
        self._of_step.clear()

    def read(self) -> dict[str, tuple[Totals, int]]:
        """Return, by parameter, its totals and the last step that moved it (0: none did). Waits for the device."""
        return {
            name: (Totals(*map(int, total.tolist())), int(self._last_move[name]))
            for name, total in self._totals.items()
        }


class OldValues(NamedTuple):
    """A segment as it was before the step."""

    segment: Segment
    old: Tensor
    weight: Tensor
    grad: Tensor | None


def before_step(segment: Segment, x: Tensor) -> OldValues:
    """Keep the values to compare with the step's result. x: the FP32 value before: the master, or the BF16 weight."""
    return OldValues(segment, x.clone(), segment.of(segment.param).clone(), segment.param.grad)


def _values(grad: Tensor) -> Tensor:
    """Return the elements of a gradient that this rank holds; of a sparse one, its stored elements."""
    held = local(grad)
    return held.coalesce().values() if held.layout is torch.sparse_coo else held
