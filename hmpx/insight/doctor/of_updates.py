"""What the updates that were seen say about the training, as problems."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

import torch

from hmpx.dtype_names import dtype_name
from hmpx.insight.doctor.problem import Problem, percent, some
from hmpx.insight.doctor.spots import Spot
from hmpx.insight.doctor.update_view import Stepped
from hmpx.insight.tensors import LOW
from hmpx.updates.lost_updates import THRESHOLD
from hmpx.updates.stepping.names import parameters

Parameter = torch.nn.Parameter
_LEAST_DECAY = 5.0  # in ulp: from so much on, decay that does not arrive is no accident
_SR = "hmpx.attach(optimizer), or --fix recipe.yaml: steps and state in FP32, stochastic rounding; see tune_weights too"
_WIDE = "keep the weights in float32 with products in BF16: --fix recipe.yaml, or torch.autocast with a GradScaler"


def of_updates(seen: Stepped, names: Mapping[Parameter, str]) -> Iterator[Problem]:
    """The problems of one optimizer. names: of its parameters."""
    if not seen.rounds:
        yield from _lost(seen, names)
        yield from _decay(seen)
        yield from _state(seen)
    yield from _learning_rate(seen)
    yield from _gradients(seen, names)


def _lost(seen: Stepped, names: Mapping[Parameter, str]) -> Iterator[Problem]:
    cls, tallies = type(seen.optimizer).__name__, seen.tallies
    updates = sum(each.updates for each in tallies.values())
    if updates:
        worst = sorted(tallies, key=lambda p: -tallies[p].lost / max(tallies[p].updates, 1))
        losing = tuple(p for p in worst if tallies[p].lost > THRESHOLD * tallies[p].updates)
        if losing:
            lost, first = sum(each.lost for each in tallies.values()) / updates, tallies[losing[0]]
            said = (
                f"round-to-nearest loses {percent(lost)} of the updates of {dtype_name(losing[0].dtype)} weights by "
                f"{cls}, and more than {100 * THRESHOLD:g} % in {len(losing)} of {len(worst)} parameters, most in "
                f"{names[losing[0]]} ({percent(first.lost / first.updates)}); half of the updates are below "
                f"{statistics.median(seen.sizes):.2g} ulp"
            )
            do = _SR if losing[0].dtype is torch.bfloat16 else _WIDE
            yield Problem("lost updates", True, said, do, seen.where, tuple(names[p] for p in losing), weight=lost)
    elif seen.unknown[0] and seen.unknown[1] > THRESHOLD * seen.unknown[0]:
        share = seen.unknown[1] / seen.unknown[0]
        said = f"{percent(share)} of the weights in low precision that had a gradient did not move in a step of {cls}, "
        said += "which cannot be taken again in FP32 to tell why"
        do = "hmpx.attach(optimizer).updates() counts what is lost"
        yield Problem("lost updates", False, said, do, seen.where, weight=share)


def _decay(seen: Stepped) -> Iterator[Problem]:
    asked, arrived = seen.decay
    if asked >= _LEAST_DECAY and arrived < 0.1 * asked:
        group = next(group for group in seen.optimizer.param_groups if group.get("weight_decay"))
        a_step = float(group["lr"]) * float(group["weight_decay"])
        said = f"{percent(max(arrived / asked, 0.0))} of the weight decay arrives in the weights: lr x weight_decay is "
        said += f"{a_step:.1g} of a weight, and half a unit in its last place is 0.002 or more"
        yield Problem("weight decay", True, said, _SR, seen.where, weight=0.5)


def _state(seen: Stepped) -> Iterator[Problem]:
    for key, (moved, stayed) in seen.idle.items():
        if moved and stayed > 0.5 * moved:
            said = f"{key} in {' and '.join(map(dtype_name, seen.low_state))} cannot fall: what a step takes off it is "
            said += f"less than half a unit in its last place, in {percent(stayed / moved)} of the elements"
            yield Problem("optimizer state", True, said, _SR, seen.where, weight=0.45)


def of_dropped(casts: Sequence[tuple[Spot, Parameter]], names: Mapping[Parameter, str]) -> Problem:
    """Parameters that were to be FP32 before the training began."""
    spot, which = casts[0][0], tuple(dict.fromkeys(names[p] for _, p in casts))
    verbs = ("was", "is") if len(which) == 1 else ("were", "are")
    said = f"{some(which)} {verbs[0]} to be float32 here, and {verbs[1]} still in {spot.said} at the first step"
    do = (
        "module.float() after whatever casts the model, before the optimizer is made; tensor.float() works not in place"
    )
    return Problem("upcast", True, said, do, spot.where, which, weight=0.55)


def _learning_rate(seen: Stepped) -> Iterator[Problem]:
    rates = [group.get("lr") for group in seen.optimizer.param_groups]
    low = next((lr.dtype for lr in rates if isinstance(lr, torch.Tensor) and lr.dtype in LOW), None)
    if low is not None:
        said = f"the learning rate is a tensor in {dtype_name(low)}: a scheduler's factor of 0.999 leaves it as it is"
        do = "give the optimizer a float, or a tensor in float32"
        yield Problem("learning rate", True, said, do, seen.where, weight=0.4)


def _gradients(seen: Stepped, names: Mapping[Parameter, str]) -> Iterator[Problem]:
    of_weights, of_gradients = seen.nonfinite_weights, seen.nonfinite
    if (step := of_gradients if of_weights is None else of_weights) is not None:
        said = f"gradients are inf or NaN in step {step}"
        said = said if of_weights is None else f"weights are inf or NaN from step {step} on"
        do = f"doctor --at {step} looks at every op of that step and names the first"
        yield Problem("inf or NaN", True, said, do, seen.where, weight=0.9 if of_weights is None else 1.0)
    if seen.samples < 2:
        return
    params = parameters(seen.optimizer)
    for found, what in ((seen.no_grad, "no gradient"), (seen.zero_grad, "a gradient of zeros")):
        always = tuple(names[p] for p in params if found[p] == seen.samples)
        every = len(always) == len(params)
        if always and not (every and what == "no gradient"):
            said = (
                f"{len(always)} of {len(params)} parameters had {what} in each step that was looked at: {some(always)}"
            )
            do = "leave them out of the optimizer, or look for what cuts them off"
            yield Problem("gradients", every, said, do, seen.where, always, weight=0.05)
