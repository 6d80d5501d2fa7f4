"""What code hears that asks about `torch.autocast` while op lists cast.

``custom_fwd(cast_inputs=)``, DataParallel, transformers' `maybe_autocast` and kernels that hmpx cannot reach (flash
attention, Mamba's scans) first ask whether autocast is on and in which dtype: where hmpx casts, they hear yes, and the
low precision of the lists. What torch asks to save and restore the state (Dynamo, AOTAutograd, checkpointing, CUDA
graphs) gets torch's own answers: an answer of ours would be written back, and turn autocast on.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType

import torch
from torch.compiler import is_dynamo_compiling

from hmpx.base import process_state, region_state
from hmpx.base.changes import Changes
from hmpx.base.compiling import with_dynamo
from hmpx.ops.autocast_regions import ENTER, governs, in_enabled_region, is_for_a_model
from hmpx.ops.decision_log import say_once
from hmpx.ops.policies.scopes import Policies
from hmpx.ops.wrapping.switch import Switch, in_forward
from hmpx.ops.wrapping.wrappers import Patch, Patching, patch_at

_ENABLED = ("is_autocast_enabled", "is_autocast_cpu_enabled", "is_autocast_xla_enabled", "is_autocast_ipu_enabled")
_DTYPE = ("get_autocast_dtype", "get_autocast_gpu_dtype", "get_autocast_cpu_dtype", "get_autocast_xla_dtype")
_BY_HAND = ("set_autocast_enabled", "set_autocast_cpu_enabled", "set_autocast_xla_enabled", "set_autocast_ipu_enabled")
_TWICE = (
    "torch's own autocast is on, by torch.set_autocast_enabled or around convert(): it casts after the op lists, by "
    "lists of its own, and so decides for the ops in these; leave it out"
)


def patches(switch: Switch, policies: Policies) -> Iterator[Patch]:
    """Yield the patches of the functions that say whether autocast is on, and in which dtype, and that turn it on."""

    def low(scope: int) -> torch.dtype | None:
        policy = policies.at(scope)
        return policy.low_precision if policy.bf16 or policy.fp8 or policy.bf16_to_fp32 else None

    vars(low)["_dynamo_marked_constant"] = True  # it depends on nothing but the scope

    def answering(is_dtype: bool, original: Callable) -> Callable:
        @functools.wraps(original)
        def answer(*args, **kwargs):
            if not is_dynamo_compiling() and sys._getframe(1).f_code is ENTER:
                return original(*args, **kwargs)
            if args or kwargs:
                found = original(*args, **kwargs)  # which may not know the device
            if not switch.retired and (is_dynamo_compiling() or is_for_a_model(sys._getframe(1))) and _casts_here():
                dtype = low(region_state.scope())
                if dtype is not None:
                    return dtype if is_dtype else True
            return found if args or kwargs else original()

        return answer

    def telling(original: Callable) -> Callable:
        @functools.wraps(original)
        def set_enabled(*args, **kwargs):
            original(*args, **kwargs)
            if True in (*args, *kwargs.values()) and not is_dynamo_compiling() and not switch.retired:
                _say_by_hand(sys._getframe(1))

        return set_enabled

    builds = ((_ENABLED, functools.partial(answering, False)), (_DTYPE, functools.partial(answering, True)))
    for names, build in (*builds, (_BY_HAND, telling)):
        for name in names:
            if hasattr(torch, name):
                yield patch_at(f"torch.{name}", Patching.AUTOCAST, build)


def _casts_here() -> bool:
    """Whether an op that the asking code calls now is cast."""
    acts = region_state.acts()
    if acts is not None or is_dynamo_compiling():
        return acts is not False and process_state.converted
    return process_state.converted and (in_enabled_region() or in_forward(sys._getframe(2)))


def _say_by_hand(frame: FrameType) -> None:
    if not frame.f_globals.get("__name__", "").startswith("torch.") and governs():
        say_once(logging.WARNING, _TWICE, frame)


def say_if_on(frame: FrameType) -> None:
    """Warn where a conversion begins while torch's own autocast is on."""
    if any(map(torch.is_autocast_enabled, ("cpu", "cuda", "xpu", "mps"))):
        say_once(logging.WARNING, _TWICE, frame)


def let_dynamo_fold(changes: Changes) -> None:
    """Let Dynamo's table of constants hold torch's own functions, where it is made while ours stand in their places."""

    def fold(dynamo: ModuleType) -> None:
        table = dynamo.variables.torch.constant_fold_functions
        for name in (*_ENABLED, *_DTYPE):
            ours = getattr(torch, name, None)
            if ours is not None and ours in table and (original := inspect.unwrap(ours)) is not ours:
                del table[ours]
                table[original] = None

    with_dynamo(fold, changes)
