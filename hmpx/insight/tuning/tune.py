"""`tune`: what it is asked for, checked before anything runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hmpx.base import region_state
from hmpx.base.dtype_names import dtype_name
from hmpx.errors import HmpxError, did_you_mean
from hmpx.insight.run_state import eager
from hmpx.insight.tensors import LOW
from hmpx.insight.trials.runs import Progress
from hmpx.insight.trials.subject import Loss, Subject, arguments_of, lists_meant
from hmpx.insight.tuning.find import Tuning
from hmpx.insight.tuning.tuned import Tuned
from hmpx.insight.tuning.worth import LOWS, Low
from hmpx.ops.module_rules import rules_of
from hmpx.ops.policies.fp8_format import FORMATS
from hmpx.ops.policies.policy import Policy
from hmpx.recipes.recipe import Recipe

_LEAST = 2  # batches to tune on, and to hold out


def tune(
    model: torch.nn.Module,
    batches: Sequence[tuple],
    loss: Loss,
    *,
    low: Low | str = "bf16",
    tolerance: float = 0.1,
    held_out: Sequence[tuple] | None = None,
    lists: Policy | Recipe | Mapping[str, Any] | str | None = None,
    progress: bool = True,
) -> Tuned:
    """Find the op lists of a model: as many FLOPs of matrix products in BF16 as the training bears.

    If all products hold together in BF16, that is the answer. Else each list name alone runs in BF16, and the change of
    the gradients is measured beside FP32. Names are ranked by harm for their FLOPs, a harmful name is divided by
    module, and the longest beginning of the ranking that holds is found. The lists are verified on batches that took no
    part in the search. Last, a step is timed under them, in plain FP32, and under torch.autocast.

    Args:
        model: in FP32. It is as it was afterwards: parameters, gradients, buffers, random number generators.
        batches: a list of tuples or lists of positional arguments, as a DataLoader gives them; at least four, or two
            beside `held_out`. A batch of one argument that is a list of tensors is written ``([...],)``. The FP32
            gradients of all batches are kept in memory.
        loss: called as ``loss(model, *batch)``, returns a scalar tensor.
        low: "bf16" chooses between BF16 and FP32; "fp8" between FP8 and BF16: which modules may multiply in FP8, in the
            `fp8_format` of `lists`, and what cannot or may not is in BF16. The name of a format ("nvfp4") is "fp8" with
            that one.
        tolerance: the gradient error that is allowed, in units of the noise between batches, see `Comparison`. The part
            of it that is the same in every batch may be half of that. The loss may change by as much of the noise
            between the losses of batches.
        held_out: batches to verify on; None takes the last third of `batches`.
        lists: where to begin, as for `compare`: they decide about what the model does not call.
        progress: show on standard error how far it is; one line at the end where that is no terminal.

    Raises:
        HmpxError: something above does not fit; the model has rules (`policy_for`) or `casts` is open around; the loss
            is not finite in FP32; the loss in FP32 is another one when it is computed again.

    Example:
        >>> batches = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(8)]
        >>> def loss(model, x, y):
        ...     return torch.nn.functional.mse_loss(model(x), y)
        >>> tuned = hmpx.tune(model, batches, loss, progress=False)
        >>> "linear" in tuned.policy.bf16, tuned.met
        (True, True)
    """
    if low not in LOWS:
        raise HmpxError(f"tune: low {low!r} does not exist (legal: {', '.join(LOWS)}){did_you_mean(str(low), LOWS)}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise HmpxError(f"tune: tolerance={tolerance!r} is no gradient error, in units of the noise between batches")
    policy, recipe, kernels = lists_meant(lists, "tune")
    if low in FORMATS:
        policy = replace(policy, fp8_format=FORMATS[low])
    side: Low = "bf16" if low == "bf16" else "fp8"
    if recipe is not None and recipe.modules:
        raise HmpxError("tune: the recipe has rules for modules already, which tune is to find: leave `modules` out")
    subject = Subject(model, batches, loss, recipe, "tune")
    _check_nothing_around(model)
    given = subject.batches
    tuning = len(given)
    if held_out is None:
        tuning -= max(_LEAST, tuning // 3)
    else:
        subject.batches = [*given, *arguments_of(held_out, "held_out", "tune")]
    if min(tuning, len(subject.batches) - tuning) < _LEAST:
        beside = "" if held_out is None else f" and {len(held_out)} held out"
        raise HmpxError(
            f"tune: {len(given)} batch{'es' if len(given) > 1 else ''}{beside}: the noise between batches is the scale "
            "of every error, and takes two to tune on and two to verify on; give four or more that differ"
        )
    _check_in_fp32(model)
    counted = Progress("tune", progress)
    try:
        with contextlib.ExitStack() as undo:
            undo.enter_context(subject.gradients_kept())
            undo.enter_context(eager())
            return Tuning(subject, tuning, counted, policy, recipe, kernels, side, float(tolerance)).run()
    finally:
        counted.end()


def _check_in_fp32(model: torch.nn.Module) -> None:
    """Check that a model has no parameters in low precision or FP64."""
    for name, p in model.named_parameters():
        if p.dtype in LOW or p.dtype is torch.float64:
            raise HmpxError(
                f"tune: parameter {name!r} is {dtype_name(p.dtype)}; it begins with a model in FP32: model.float(), or "
                "the model as it is made"
            )


def _check_nothing_around(model: torch.nn.Module) -> None:
    """Check that no lists of modules, or around the call, lie over the lists that are tried."""
    for name, module in model.named_modules():
        rule = next((rule for _, rule in rules_of(module) if rule.active), None)
        if rule is not None:
            raise HmpxError(
                f"tune: module {name!r} has a rule ({rule.where}), which tune is to find: remove() it, or leave the "
                "recipe that brings it"
            )
    if region_state.scope() or region_state.casting() is False:
        region = "casts(...)" if region_state.scope() else "disable_casts()"
        raise HmpxError(
            f"tune: {region} is open around it, and would decide in the place of the lists: call it outside"
        )
