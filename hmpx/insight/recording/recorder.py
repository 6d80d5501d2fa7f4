"""The observer behind `hmpx.record`: adds each call to the record of its site.

A call costs a walk from the wrapper to the user's frame, and a look at the dtypes of its tensors; what stays the same
from call to call (names, reasons, shapes in words) is worked out when a site is new.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from time import perf_counter
from typing import Any

import torch

from hmpx import region_state, rounding, updates
from hmpx.conversion import Conversion, installed
from hmpx.insight.module_names import ModuleNames
from hmpx.insight.reasons import reason_of_call
from hmpx.insight.recording.device import DeviceSide
from hmpx.insight.recording.fp8 import Fp8Casts, watched
from hmpx.insight.recording.log import Log
from hmpx.insight.recording.site import SHAPES, Site
from hmpx.insight.recording.trips import RoundTrips
from hmpx.insight.recording.unmatched import unmatched
from hmpx.insight.tensors import Tensor, floating, is_finite, is_masked, is_readable, name
from hmpx.insight.unchosen import unchosen
from hmpx.ops.forwards import side_that_casts
from hmpx.ops.policies.policy import Policy, Rule
from hmpx.ops.wrapping.callers import frames, modules, users_frame
from hmpx.ops.wrapping.observing import Point, Run, Seen
from hmpx.ops.wrapping.rules import TARGETS

_unasked = torch._C.DisableTorchFunctionSubclass  # classes of tensors, which may know no function that reads a dtype
_STEPS = tuple(os.path.dirname(str(package.__file__)) + os.sep for package in (torch.optim, updates, rounding))


class Recorder:
    """Collects sites and round trips. What an optimizer does in its step is left out."""

    everything = True

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sites: dict[tuple, Site | None] = {}
        self._used: dict[int, set[str]] = {}  # by place: ops that were called, and names in lists that they follow
        self._conversions: list[Conversion] = []  # that were in force
        self._names = ModuleNames()
        self._device = DeviceSide()
        self._lock = threading.Lock()
        self._calls = 0  # of all sites
        self._codes: dict[int, tuple[types.CodeType, bool]] = {}  # by identity: a function's, and whether of a step
        self._trips = RoundTrips(log.round_trips)
        self._fp8: dict[int, tuple[Site, Fp8Casts]] = {}  # by identity of the site

    def __call__(self, point: Point, run: Run, frame: types.FrameType, args: tuple, kwargs: dict) -> Seen:
        if self.leaves(frame.f_code):
            return run(*args, **kwargs)
        with _unasked():
            began = self._device.begin(args)
        casts = Fp8Casts() if point.rule is Rule.FP8 else None
        entered = perf_counter()
        with watched(casts) if casts else contextlib.nullcontext():
            seen = run(*args, **kwargs)
        with _unasked():
            site = self._note(point, seen, frame, args, kwargs, began, entered)
        if casts and site is not None:
            with self._lock:
                self._fp8.setdefault(id(site), (site, Fp8Casts()))[1].take(casts)
        return seen

    def _note(
        self,
        point: Point,
        seen: Seen,
        frame: types.FrameType,
        args: tuple,
        kwargs: dict,
        began: Any,
        entered: float,
    ) -> Site | None:
        given = floating((*args, *kwargs.values()) if kwargs else args)
        result = floating((seen.result,))
        if not given and not result:
            return None
        if point.op == "to" and not (given and result and given[0].dtype is not result[0].dtype):
            return None
        inside = floating((*seen.args, *seen.kwargs.values()) if seen.kwargs else seen.args)
        user = users_frame(frame)
        module = next(modules(frame), None)
        key = (
            *((id(user.f_code), user.f_lineno) if user is not None else (0, 0)),
            *(id(point), id(module), seen.casting),
            *(tuple([tensor.dtype for tensor in tensors]) for tensors in (given, inside, result)),
        )
        if key not in self._sites:
            with self._lock:
                if key not in self._sites:  # another thread may have been first
                    made = self._new_site(point, seen, frame, user, module, given, inside, result)
                    if made is not None:
                        self._log.sites.append(made)
                    self._sites[key] = made
        site = self._sites[key]
        if site is not None:
            self._add(site, seen, None if began else entered, given, inside, result)
            if began:
                self._device.end(site, began)
        return site

    def leaves(self, caller: types.CodeType) -> bool:
        """Whether a function computes an optimizer's step."""
        known = self._codes.get(id(caller))
        if known is None:
            known = self._codes[id(caller)] = caller, caller.co_filename.startswith(_STEPS)
        return known[1]

    def _add(
        self,
        site: Site,
        seen: Seen,
        entered: float | None,
        given: list[Tensor],
        inside: list[Tensor],
        result: list[Tensor],
    ) -> None:
        by_hand = site.op == "to"
        cast = [(a, b) for a, b in zip(given, result if by_hand else inside, strict=False) if a.dtype is not b.dtype]
        moved = sum([a.numel() * (a.element_size() + b.element_size()) for a, b in cast])
        with self._lock:
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
        if site.nonfinite is None:
            for tensor in result:
                if not is_readable(tensor):
                    self._device.look(site, tensor, self._calls)
                elif not is_finite(tensor) and not is_masked(site.op, given, tensor):
                    site.nonfinite, site.nonfinite_at = site.calls, self._calls
                    break
        with self._lock:
            self._trips.follow(site, given, inside, result)

    def _new_site(
        self,
        point: Point,
        seen: Seen,
        frame: types.FrameType,
        user: types.FrameType | None,
        module: torch.nn.Module | None,
        given: list[Tensor],
        inside: list[Tensor],
        result: list[Tensor],
    ) -> Site | None:
        if any(each.f_code.co_filename.startswith(_STEPS) for each in frames(frame)):
            return None
        conversion = self._remember(installed())
        policy = conversion.policy_here if conversion else Policy()
        listed = policy.listed(point.op)
        rule = point.rule if seen.casting else listed if listed is Rule.PROMOTE and point.rule is None else None
        self._used.setdefault(region_state.scope(), set()).update((point.op, *point.follows))
        return Site(
            op=point.op,
            entry=point.label,
            where="?" if user is None else f"{user.f_code.co_filename}:{user.f_lineno}",
            module=self._names.of_module(module, frame),
            rule=str(rule or "") or side_that_casts(frame),
            reason=reason_of_call(point, seen, policy, frame),
            given=tuple([name(tensor.dtype) for tensor in given]),
            seen=tuple([name(tensor.dtype) for tensor in inside]),
            result=tuple([name(tensor.dtype) for tensor in result]),
            unchosen="" if rule in TARGETS else unchosen(self._names, frame, given, result),
        )

    def _remember(self, conversion: Conversion | None) -> Conversion | None:
        """Note that a conversion was in force."""
        if conversion is not None and conversion not in self._conversions:
            self._conversions.append(conversion)
        return conversion

    def finish(self) -> None:
        """Complete the log: read the counts from the devices once, and note which names in the lists were used."""
        self._device.finish()
        for site, casts in self._fp8.values():
            casts.into(site)
        self._remember(installed())
        if not self._conversions:
            return
        last = self._conversions[-1]
        self._log.policy = str(last.policy)
        self._log.unmatched, self._log.unmatched_of_hmpx = unmatched(last.policy, self._used)
        self._log.escaped = last.escaped
