"""What round-to-nearest would lose of the updates, counted where a step writes weights back.

A step reads a weight, computes in FP32 and writes the result back, all through its weight store. While somebody looks,
the store stands behind a `WatchedStore`, which does what the store does and compares: the weight as it stood, the FP32
result, what was written. Nothing but counts is kept, as int64 on the parameter's device: they do not depend on how a
parameter is cut, and no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from hmpx.rounding import native
from hmpx.updates.ranks.sharding import local
from hmpx.updates.rounding_key import RoundingKey
from hmpx.updates.segment import Segment
from hmpx.updates.weights import StepStore

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

ULP = 1 << 16  # `error`, `bias` and `size` are counted in this fraction of a unit in BF16's last place: FP32's own one
_EXPONENT = 0x7F800000  # the bits of it in FP32


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
        old: what was held before the step, in FP32: the master, or the BF16 weight.
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
    """How many FP32 numbers lie from `x` up to the BF16 number that it was rounded to, which has its sign.

    The bits of FP32 numbers of one sign count them, and those of BF16 numbers are their upper half.
    """
    bits = x.view(torch.int32)
    away_from_zero = (rounded.view(torch.int16).int() << 16) - bits
    sign = bits >> 31  # 0 or -1, all ones: y ^ -1 is -y - 1
    return (away_from_zero ^ sign) - sign


def _power_of_two(magnitude: Tensor) -> Tensor:
    """The largest power of two that is not above a number; from the smallest normal one on, BF16's unit follows it."""
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
        """A step begins."""
        self._of_step.clear()

    def add(self, segment: Segment, counts: Tensor, grad: Tensor | None) -> None:
        """Add the `counts` of one segment to those of this step.

        grad: of the whole parameter; None if it had none.
        """
        of_step = self._of_step.setdefault(segment.name, counts.new_zeros(len(Totals._fields)))
        of_step[: len(counts)] += counts
        if segment.offset == 0:  # once a parameter
            of_step[_NO_GRADIENT] = grad is None
            if grad is not None and segment.count:
                of_step[_ZERO_GRADIENT] = ~_values(grad).any()

    def end(self, params: Iterable[tuple[str, Parameter]]) -> None:
        """The step went through. `params`: the BF16 parameters of the optimizer, with their names."""
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
        """By parameter, its totals and the last step that moved it (0: none did). Waits for the device."""
        return {
            name: (Totals(*map(int, total.tolist())), int(self._last_move[name]))
            for name, total in self._totals.items()
        }


class _Before(NamedTuple):
    """What a segment was before the step."""

    old: Tensor
    weight: Tensor
    grad: Tensor | None


class WatchedStore:
    """A weight store, for a step or a part of one, that counts what it is given to write."""

    def __init__(self, store: StepStore, counts: UpdateCounts) -> None:
        self._store, self._counts = store, counts
        self._before: dict[tuple[Parameter, int], _Before] = {}

    def read_all(self, segments: list[Segment], outs: list[Tensor]) -> None:
        self._store.read_all(segments, outs)
        for segment, out in zip(segments, outs, strict=True):
            p = segment.param
            self._before[p, segment.offset] = _Before(out.clone(), segment.of(p).clone(), p.grad)

    def write(self, segment: Segment, x: Tensor, rounding_key: RoundingKey) -> None:
        self._store.write(segment, x, rounding_key)
        p = segment.param
        old, weight, grad = self._before.pop((p, segment.offset))  # by now, a closure may have tried other weights
        # A closure gives the gradient later than that; a step may take it away.
        self._counts.add(segment, count(old, weight, x, segment.of(p)), grad if p.grad is None else p.grad)

    def held(self, param: Parameter) -> list[Tensor]:
        return self._store.held(param)

    def kept(self, segment: Segment) -> native.Held | None:
        return self._store.kept(segment)

    def begin(self, segment: Segment, rounding_key: RoundingKey) -> None:
        self._store.begin(segment, rounding_key)

    def all_held(self) -> list[Tensor]:
        return self._store.all_held()


def watched_kernel(
    counts: UpdateCounts, segment: Segment, kernel: Callable[[], None], exact: Callable[[], tuple[Tensor, Tensor]]
) -> Callable[[], None]:
    """`kernel`, which steps a whole parameter and rounds it at once, counted.

    exact: computes the FP32 numbers that the kernel begins with, and those that it is going to round.
    """

    def watched() -> None:
        weight, (old, x) = segment.of(segment.param).clone(), exact()
        kernel()
        counts.add(segment, count(old, weight, x, segment.of(segment.param)), segment.grad)

    return watched


def _values(grad: Tensor) -> Tensor:
    """The elements of a gradient that this rank holds, of a sparse one those that are there."""
    held = local(grad)
    return held.coalesce().values() if held.layout is torch.sparse_coo else held
