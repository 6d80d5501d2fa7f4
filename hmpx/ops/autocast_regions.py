"""`torch.autocast` while op lists cast: its regions are hmpx's.

Models say "FP32 here" by ``with torch.autocast(device, enabled=False):``, around rotary angles, routers, norms and
losses. Such a region is an *island* (`base.region_state`): the lists cast nothing in it. An enabled region casts by the
lists, as the code around it does. Inside an island it undoes the island, as nested regions of torch do. torch's own
autocast stays as it was, so no op is cast twice.

- The device of a region is not asked for: "no autocast on cuda" in the code of a model means FP32 on any device.
- Outside of every model and of every enabled region, ``enabled=False`` is usually the switch of a training script
  (``enabled=args.amp``): there the forwards of modules cast, and what the script itself computes is left alone.
- A rule of the module that opens the island, and that names ops for low precision, has the last word.
- With casts off (`disable_casts`, ``convert(enabled=False)``, an optimizer step) all of this is torch's own again.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from types import FrameType

import torch

from hmpx.base import process_state, region_state
from hmpx.base.changes import Attribute, Changes
from hmpx.base.compiling import never_compile
from hmpx.base.dtype_names import dtype_name
from hmpx.base.torch_private import AUTOCAST, private
from hmpx.ops.decision_log import say_beats_island, say_once
from hmpx.ops.module_rules import lowering_rule
from hmpx.ops.policies.policy import LOW_RULES
from hmpx.ops.policies.scopes import Policies
from hmpx.ops.wrapping.callers import modules, users_line
from hmpx.ops.wrapping.switch import in_forward, is_in_model

logger = logging.getLogger("hmpx")
_set_enabled = private("torch._C.set_autocast_enabled")
_SUBCLASSES = frozenset({"torch.cuda.amp.autocast_mode", "torch.cpu.amp.autocast_mode"})  # of torch.autocast
# The modules of torch that read the autocast state, or open a region, for a model. Its other modules only save the
# state and restore it. So does checkpointing: its functions carry the region of their forward with them.
_FOR_MODELS = frozenset({"torch.amp.autocast_mode", "torch.nn.parallel.parallel_apply"})
_NOTHING = "torch's own lists do nothing"
ENTER = inspect.unwrap(torch.autocast.__enter__).__code__  # which saves the state
_ASKED = "_hmpx_enabled"  # attribute of a region: what it was asked for, where torch turns off what no device can do


def governs() -> bool:
    """Whether a `torch.autocast` region that opens here is hmpx's."""
    return process_state.converted and (region_state.acts() is not False or region_state.in_island())


def is_for_a_model(frame: FrameType) -> bool:
    """Return whether the code that runs in `frame` asks, or opens a region, for a model, and not to restore a state."""
    name = frame.f_globals.get("__name__", "")
    return name[:6] != "torch." or (name in _FOR_MODELS and frame.f_code is not ENTER)


def in_enabled_region() -> bool:
    """Whether a `torch.autocast` region that casts is open here, whatever is open in it."""
    return any(isinstance(each.owner, torch.autocast) and not each.island for each in region_state.open_regions())


def asked_for(region: torch.autocast, enabled: bool) -> bool:
    """Return the `enabled` that a region was made with; torch turns one off that its device cannot do."""
    return vars(region).get(_ASKED, enabled)


class AutocastRegions:
    """Makes the regions of `torch.autocast` hmpx's, for one conversion."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._open: dict[int, region_state.Region] = {}  # by identity

    def apply(self, changes: Changes) -> None:
        """Begin, until `changes` are undone; a region that is open then ends for hmpx."""
        if not AUTOCAST.is_on():
            return
        changes.callback(self._end)
        cls = torch.autocast
        for name, build in (("__init__", _noting), ("__enter__", self._entering), ("__exit__", self._leaving)):
            method = build(vars(cls)[name])
            never_compile(method)  # Dynamo has a variable of its own for a region (`ops.autocast_traced`)
            changes.put(Attribute(cls, name, f"torch.autocast.{name}"), method)

    def _end(self) -> None:
        for region in list(self._open.values()):
            region_state.leave(region)
        self._open.clear()

    def _entering(self, enter: Callable) -> Callable:
        @functools.wraps(enter)
        def entering(region):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _SUBCLASSES:
                frame = frame.f_back
            if not (is_for_a_model(frame) and governs()):
                return enter(region)
            casts = asked_for(region, region._enabled) and region.fast_dtype in LOW_RULES
            if casts:
                _enter_switched_off(enter, region)
                self._say(region, frame)
            else:
                enter(region)
                casts = _is_overruled(frame)
            own = region_state.enter_autocast(casts, casts or is_in_model(frame) or in_enabled_region(), region)
            self._open[id(own)] = own
            if process_state.observer is not None:
                own.where = users_line(frame)
            return region

        return entering

    def _leaving(self, exit_: Callable) -> Callable:
        @functools.wraps(exit_)
        def leaving(region, *exception):
            try:
                return exit_(region, *exception)
            finally:
                own = region_state.owned_by(region)
                if own is not None:
                    region_state.leave(own)
                    self._open.pop(id(own), None)

        return leaving

    def _say(self, region: torch.autocast, frame: FrameType) -> None:
        low = self._policies.at(region_state.scope()).low_precision
        if region.fast_dtype is not low:
            dtypes = f"to {dtype_name(low)} and not to {dtype_name(region.fast_dtype)}"
            say_once(logging.WARNING, f"in this torch.autocast the op lists cast, {dtypes}; {_NOTHING}", frame)
        elif logger.isEnabledFor(logging.INFO) and not in_forward(frame):
            say_once(logging.INFO, f"in this torch.autocast the op lists cast; {_NOTHING}", frame)


def _is_overruled(frame: FrameType) -> bool:
    """Return whether a rule of the module whose code runs in `frame` has the last word over an island."""
    module = next(modules(frame), None)
    rule = None if module is None else lowering_rule(module)
    if rule is not None:
        say_beats_island(f"the rule for this {type(module).__name__} ({rule.where})", frame)
    return rule is not None


def _noting(init: Callable) -> Callable:
    @functools.wraps(init)
    def noting(region, *args, **kwargs):
        vars(region)[_ASKED] = bool(kwargs["enabled"] if "enabled" in kwargs else args[2] if len(args) > 2 else True)
        init(region, *args, **kwargs)

    return noting


def _enter_switched_off(enter: Callable, region: torch.autocast) -> None:
    """Enter a region as a disabled one, so that its exit fits; then set torch's autocast back to what it was.

    All threads share the region of a decorator, so its `_enabled` stays.
    """
    other = object.__new__(type(region))
    vars(other).update(vars(region), _enabled=False)
    enter(other)
    vars(region).update(vars(other), _enabled=region._enabled)
    _set_enabled(region.device, region.prev)
