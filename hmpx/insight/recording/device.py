"""What `record` gathers on an accelerator, so that nothing waits for the device before the end.

That is the first result that is not finite, the times of calls, and the figures of casts to FP8: how large the numbers
are, and how many of them the format does not hold.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import torch

from hmpx.base import run_in_region
from hmpx.base.process_state import fp8_watchers
from hmpx.insight.recording.recorded import Site
from hmpx.ops.computing.fp8_casts import spills_of
from hmpx.ops.wrapping.overriding import PLAIN
from hmpx.rounding.devices import lacks_data

Tensor = torch.Tensor
aten = torch.ops.aten
_NEVER = 2**62
_SHIFT = 31  # a call's number among all, and beneath it the one among those of its site, in one integer
_FIGURES = (
    *("largest", "elements", "underflowed", "saturated"),
    *("blocks", "blocks_underflowed", "blocks_saturated"),
)


class DeviceSide:
    """Keeps the first call of each site whose result was not finite on its device, and times calls on CUDA.

    An accelerator runs behind the program, so that only events on the device know how long an op takes there. They
    measure the op together with its casts.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, torch.device], tuple[Site, Tensor]] = {}
        self._running: deque[tuple[Site, Any, Any]] = deque()

    def begin(self, args: tuple) -> Any:
        """Return an event on the device that a call is about to run on; None where the program itself runs the op."""
        if not args or not isinstance(args[0], Tensor) or not args[0].is_cuda or lacks_data(args[0]):
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, site: Site, began: Any) -> None:
        """End the call that began with this event, and add up the times that the device knows by now."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._running.append((site, began, ended))
        while self._running and self._running[0][2].query():
            self._add_first()

    def look(self, site: Site, tensor: Tensor, number: int) -> None:
        """Note on its device whether the result of a call is finite; a few small ops, and no wait.

        number: of the call among those of all sites.
        """
        if type(tensor) not in PLAIN or tensor.device.type in ("cpu", "meta") or tensor.layout is not torch.strided:
            return
        with torch.no_grad(), run_in_region.region(False):
            key = id(site), tensor.device
            if key not in self._first:
                self._first[key] = site, torch.full((), _NEVER, dtype=torch.int64, device=tensor.device)
            finite = torch.isfinite(tensor).all()
            first = self._first[key][1]
            first.copy_(torch.minimum(first, torch.where(finite, _NEVER, number << _SHIFT | site.calls)))

    def finish(self) -> None:
        """Write the figures into the sites, which waits for the devices."""
        for site, first in self._first.values():
            number, call = divmod(int(first), 1 << _SHIFT)
            if int(first) < _NEVER and (site.nonfinite_at is None or number < site.nonfinite_at):
                site.nonfinite, site.nonfinite_at = call, number
        self._first.clear()
        while self._running:
            self._running[0][2].synchronize()
            self._add_first()

    def _add_first(self) -> None:
        site, began, ended = self._running.popleft()
        site.op_seconds += began.elapsed_time(ended) / 1000


class Fp8Casts:
    """The casts to FP8 of one call, which go on in its backward pass, or of a site."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}  # on the device, until the end
        self.in_low: Counter[str] = Counter()
        self._rest: Fp8Casts | None = None  # of the site, once it is known

    def note(self, why_not: str) -> None:
        """Note that a call that is listed for FP8 is computed in FP8, or in low precision for this reason."""
        if why_not:
            self.in_low[why_not] += 1

    def seen(
        self, role: str, x: Tensor, codes: Tensor, scale: Tensor, name: str, largest: Callable[[Tensor], Tensor]
    ) -> None:
        """Note an operand, the codes that it was cast to, and the scale that decodes them.

        largest: finds the largest number among those that share a scale.
        """
        if not role:
            return
        size = aten.abs(aten.to.dtype(x.detach(), torch.float32))
        size = aten.where(aten.isfinite(size), size, 0.0)
        made = aten.abs(aten.to.dtype(codes, torch.float32))
        zero = aten.bitwise_and(aten.eq(made, 0), aten.gt(size, 0))
        beyond = aten.gt(aten.div(size, scale), spills_of(name))
        lost = aten.bitwise_and(aten.eq(largest(made), 0), aten.gt(largest(size), 0))
        clipped = aten.gt(largest(aten.to.dtype(beyond, torch.float32)), 0)
        every = aten.ones_like(zero), zero, beyond, aten.ones_like(lost), lost, clipped
        counts = [aten.to.dtype(aten.sum(each), torch.float64) for each in every]
        found = aten.stack([aten.to.dtype(aten.amax(size), torch.float64), *counts])
        (self._rest or self)._add(role, found)

    def _add(self, role: str, found: Tensor) -> None:
        before = self._totals.get(role)
        if before is not None:
            found = aten.cat([aten.maximum(found[:1], before[:1]), aten.add(found[1:], before[1:])])
        self._totals[role] = found

    def into(self, site: Site) -> None:
        """Write the figures into a site, which waits for the device."""
        site.in_low = dict(self.in_low)
        site.fp8 = {role: dict(zip(_FIGURES, each.tolist(), strict=True)) for role, each in self._totals.items()}

    def take(self, casts: Fp8Casts) -> None:
        """Take over the casts that a call has seen, and those that it will see."""
        self.in_low.update(casts.in_low)
        for role, found in casts._totals.items():
            self._add(role, found)
        casts._rest = self


@contextlib.contextmanager
def watched(casts: Fp8Casts) -> Iterator[None]:
    """Let `casts` see this thread's casts to FP8 in a region, and those of their gradients whenever they come."""
    fp8_watchers[get_ident()] = casts
    try:
        yield
    finally:
        del fp8_watchers[get_ident()]
