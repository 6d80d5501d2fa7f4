"""What is gathered on an accelerator while a program runs, so that nothing waits for it before the end."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from hmpx import region_state
from hmpx.insight.recording.site import Site
from hmpx.ops.wrapping.overriding import PLAIN
from hmpx.rounding.dataless import lacks_data

_NEVER = 2**62
_SHIFT = 31  # a call's number among all, and beneath it the one among those of its site, in one integer


class DeviceSide:
    """The first call of each site whose result was not finite, kept on its device; and the times of calls on CUDA.

    An accelerator runs behind the program, so that only events on the device know how long an op takes there. They hold
    the op together with its casts.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[int, torch.device], tuple[Site, torch.Tensor]] = {}
        self._running: deque[tuple[Site, Any, Any]] = deque()

    def begin(self, args: tuple) -> Any:
        """An event on the device that a call is about to run on; None where the program itself runs the op."""
        if not args or not isinstance(args[0], torch.Tensor) or not args[0].is_cuda or lacks_data(args[0]):
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self, site: Site, began: Any) -> None:
        """The end of the call that `began` stands for. Times that the device knows by now are added up."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        self._running.append((site, began, ended))
        while self._running and self._running[0][2].query():
            self._add(*self._running.popleft())

    def look(self, site: Site, tensor: torch.Tensor, number: int) -> None:
        """Note on its device whether the result of a call is finite; a few small ops, and no wait.

        number: of the call among those of all sites.
        """
        if type(tensor) not in PLAIN or tensor.device.type in ("cpu", "meta") or tensor.layout is not torch.strided:
            return
        with torch.no_grad(), region_state.region(False):
            key = id(site), tensor.device
            if key not in self._first:
                self._first[key] = site, torch.full((), _NEVER, dtype=torch.int64, device=tensor.device)
            finite = torch.isfinite(tensor).all()
            first = self._first[key][1]
            first.copy_(torch.minimum(first, torch.where(finite, _NEVER, number << _SHIFT | site.calls)))

    def finish(self) -> None:
        """Bring the numbers here, which waits for the devices."""
        for site, first in self._first.values():
            number, call = divmod(int(first), 1 << _SHIFT)
            if int(first) < _NEVER and (site.nonfinite_at is None or number < site.nonfinite_at):
                site.nonfinite, site.nonfinite_at = call, number
        self._first.clear()
        while self._running:
            self._running[0][2].synchronize()
            self._add(*self._running.popleft())

    @staticmethod
    def _add(site: Site, began: Any, ended: Any) -> None:
        site.op_seconds += began.elapsed_time(ended) / 1000
