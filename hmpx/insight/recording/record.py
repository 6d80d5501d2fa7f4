"""`record`: a region in which every call of an op is added to the record of its site.

A call costs a walk from the wrapper to the user's frame, and a look at the dtypes of its tensors. Names, reasons and
shapes in words are worked out once, when a site is new.
"""

from __future__ import annotations

import contextlib
import math
import sys
import types
from collections import deque
from collections.abc import Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hmpx.base import region_state, run_in_region
from hmpx.base.process_state import lock, new_lock, observers
from hmpx.base.tensors import dtype_name, lacks_data
from hmpx.base.torch_private import private
from hmpx.conversion import Conversion, installed
from hmpx.errors import HmpxError
from hmpx.insight.capture import Capture
from hmpx.insight.finding import CallPlaces, Place, reason_of_call, unchosen
from hmpx.insight.notes import OF_STEPS
from hmpx.insight.recording.findings import Escaped, RoundTrips, unmatched
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.recorded import SHAPES, Fp8Casts, Site, watched
from hmpx.insight.report import about, device
from hmpx.insight.tensors import Tensor, eager, floating, is_finite, is_masked, is_readable, rounded_positions
from hmpx.ops.forwards import overlay_that_casts, replaced_forwards
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.callers import frames
from hmpx.ops.wrapping.observing import EntryPoint, Observer, Run, Seen
from hmpx.ops.wrapping.overriding import PLAIN
from hmpx.ops.wrapping.rules import TARGETS
from hmpx.ops.wrapping.switch import is_outside

_lock = new_lock()  # of what several threads record
_unasked = private("torch._C.DisableTorchFunctionSubclass")  # classes, which may know no function that reads a dtype


@contextlib.contextmanager
def record() -> Iterator[Log]:
    """Write down every call of an op: from which line, by which rule, in which dtypes, and what it cost.

    It sees ops in no list and casts by hand too, but no backward passes and no optimizer steps. `convert` may come
    before it, or inside. Compiled functions run eagerly meanwhile. It sees all threads, but finds the ops that no
    wrapper reaches (`Log.escaped`) only in the thread that records. On CUDA the time of an op includes its casts, and
    nothing waits for the device before the end. The record grows with the program's lines, not with its calls.

    Returns:
        A `Log`, which may be read at any time, and is complete when the region ends, by an exception as well.

    Raises:
        HmpxError: something is recorded already.

    Example:
        >>> with hmpx.convert(), hmpx.record() as log:
        ...     loss = model(inputs).log_softmax(-1).sum()
        >>> [(site.op, site.rule, site.dtypes, site.calls) for site in log.sites if site.op == "log_softmax"]
        [('log_softmax', 'fp32', 'bfloat16 -> float32', 1)]
    """
    if any(isinstance(each, Recorder) for each in observers):
        raise HmpxError("hmpx.record is open already: leave its `with` block before you open another")
    log = Log(about=about())
    recorder, escaped = Recorder(log), Escaped()
    capture = Capture([escaped], range(1, sys.maxsize), only_at=True, most=math.inf)

    def stepped(*_: object) -> None:
        log.steps += 1

    counter = register_optimizer_step_post_hook(stepped)
    replaced = replaced_forwards()  # which `observing` wraps: the conversion is put in force again
    try:
        with eager(), observing(recorder), capture.hooks():
            yield log
    finally:
        counter.remove()
        recorder.finish()
        log.about["device"] = device()  # a GPU, if the script has used one
        log.escaped += (*(line for line in replaced if line not in log.escaped), *escaped.sentences())


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let an observer see the calls of ops, under the conversion that is in force and those to come."""
    try:
        with lock:
            observers.append(observer)
            _put_in_force_again()
        yield
    finally:
        with lock:
            observers.remove(observer)
            _put_in_force_again()


def _put_in_force_again() -> None:
    conversion = installed()
    if conversion is not None:
        conversion.put_in_force_again()


class _Tensors(NamedTuple):
    """The floating tensors of a call: as they came, as the op ran on them, and its results."""

    given: list[Tensor]
    inside: list[Tensor]
    result: list[Tensor]


class Recorder:
    """Collects sites and round trips in a log. Calls inside an optimizer's step are left out."""

    everything = True

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sites: dict[tuple, Site | None] = {}
        self._used: dict[int, set[str]] = {}  # by scope: ops that were called, and names in lists that they follow
        self._conversion: Conversion | None = None  # the last that was in force
        self._places = CallPlaces()
        self._device = DeviceSide()
        self._calls = 0  # of all sites
        self._codes: dict[int, tuple[types.CodeType, bool]] = {}  # by identity: a function's, and whether of a step
        self._trips = RoundTrips(log.round_trips)
        self._fp8: dict[int, tuple[Site, Fp8Casts]] = {}  # by identity of the site

    def leaves(self, caller: types.CodeType) -> bool:
        """Return whether a function computes an optimizer's step."""
        known = self._codes.get(id(caller))
        if known is None:
            known = self._codes[id(caller)] = caller, caller.co_filename.startswith(OF_STEPS)
        return known[1]

    def __call__(self, point: EntryPoint, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        if self.leaves(frame.f_code):
            return run(*args, **kwargs)
        with _unasked():
            began = self._device.begin(args)
        casts = Fp8Casts() if point.rule is Rule.FP8 else None
        entered = perf_counter()
        with watched(casts) if casts else contextlib.nullcontext():
            seen = run(*args, **kwargs)
        with _unasked():
            tensors = _Tensors(
                floating((*args, *kwargs.values()) if kwargs else args),
                floating((*seen.args, *seen.kwargs.values()) if seen.kwargs else seen.args),
                floating((seen.result,)),
            )
            site = self._site(point, seen, frame, tensors)
            if site is not None:
                self._add(site, seen, None if began else entered, tensors)
                cast = seen.casting and site.given != site.seen
                site.outside += cast and is_outside(point.op, args, kwargs, frame)
                if began:
                    self._device.end(site, began)
        if casts and site is not None:
            with _lock:
                self._fp8.setdefault(id(site), (site, Fp8Casts()))[1].take(casts)
        return seen

    def _site(self, point: EntryPoint, seen: Seen, frame: types.FrameType, tensors: _Tensors) -> Site | None:
        """Return the site of a call; None for a call that is not recorded."""
        given, inside, result = tensors
        if not given and not result:
            return None
        if point.op == "to" and not (given and result and given[0].dtype is not result[0].dtype):
            return None
        place = self._places.of(frame)
        key = (
            *(place, id(point), seen.casting),
            *(tuple([tensor.dtype for tensor in each]) for each in (given, inside, result)),
        )
        if key not in self._sites:
            with _lock:
                if key not in self._sites:  # another thread may have been first
                    made = self._new_site(point, seen, frame, place, tensors)
                    if made is not None:
                        self._log.sites.append(made)
                    self._sites[key] = made
        return self._sites[key]

    def _new_site(
        self, point: EntryPoint, seen: Seen, frame: types.FrameType, place: Place, tensors: _Tensors
    ) -> Site | None:
        if any(each.f_code.co_filename.startswith(OF_STEPS) for each in frames(frame)):
            return None
        self._conversion = conversion = installed() or self._conversion
        policy = conversion.policy_here if conversion else Policy()
        listed = policy.listed(point.op)
        rule = point.rule if seen.casting else listed if listed is Rule.PROMOTE and point.rule is None else None
        self._used.setdefault(region_state.scope(), set()).update((point.op, *point.follows))
        dtypes = [tuple([dtype_name(tensor.dtype) for tensor in each]) for each in tensors]
        overlay = overlay_that_casts(frame)
        return Site(
            op=point.op,
            entry=point.label,
            where=place.where or "?",
            module=place.module,
            rule=str(rule or (overlay and overlay.rule_of_ops) or ""),
            reason=reason_of_call(point, seen, policy, frame),
            given=dtypes[0],
            seen=dtypes[1],
            result=dtypes[2],
            unchosen="" if rule in TARGETS else unchosen(self._places.names, frame, tensors.given, tensors.result),
        )

    def _add(self, site: Site, seen: Seen, entered: float | None, tensors: _Tensors) -> None:
        """Add a call to its site. entered: when it began, None where events on the device time it."""
        given, inside, result = tensors
        by_hand = site.op == "to"
        cast = [(a, b) for a, b in zip(given, result if by_hand else inside, strict=False) if a.dtype is not b.dtype]
        moved = sum([a.numel() * (a.element_size() + b.element_size()) for a, b in cast])
        with _lock:
            site.calls += 1
            self._calls += 1
            if len(site.shapes) < SHAPES:
                shapes = ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in given)
                if shapes not in site.shapes:
                    site.shapes.append(shapes)
            if cast:
                site.casts += len(cast)
                site.bytes_cast += moved
            if seen.casting:
                site.casts_avoided += len(given) - len(cast)
            if entered is not None:
                ran = seen.ended - seen.began
                if by_hand:
                    site.cast_seconds += ran
                else:
                    site.cast_seconds += seen.began - entered if cast else 0.0
                    site.op_seconds += ran
        for before, after in () if site.positions or by_hand else cast:
            if site.calls == 1 or is_readable(before):  # of others the first alone, which waits for the device
                site.positions = site.positions or rounded_positions(before, after.dtype)
        if site.nonfinite is None:
            for tensor in result:
                if not is_readable(tensor):
                    self._device.look(site, tensor, self._calls)
                elif not is_finite(tensor) and not is_masked(site.op, given, tensor):
                    site.nonfinite, site.nonfinite_at = site.calls, self._calls
                    break
        with _lock:
            self._trips.follow(site, given, inside, result)

    def finish(self) -> None:
        """Complete the log: read the figures from the devices once, and note which names in the lists were used."""
        self._device.finish()
        for site, casts in self._fp8.values():
            casts.into(site)
        last = installed() or self._conversion
        if last is not None:
            self._log.policy = str(last.policy)
            self._log.unmatched, self._log.unmatched_of_hmpx = unmatched(last.policy, self._used)
            self._log.escaped = last.escaped


# What an accelerator knows: nothing waits for it before the end

_NEVER = 2**62
_SHIFT = 31  # a call's number among all, and beneath it the one among those of its site, in one integer


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
