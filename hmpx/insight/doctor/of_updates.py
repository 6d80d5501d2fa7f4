"""What the updates that were seen say about the training, as problems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hmpx.dtype_names import dtype_name
from hmpx.insight.doctor.problem import Problem, percent, some
from hmpx.insight.doctor.update_view import Stepped
from hmpx.updates.names import parameters
from hmpx.updates.update_table import THRESHOLD

Parameter = torch.nn.Parameter
_LEAST_DECAY = 5.0  # in ulp: from so much on, decay that does not arrive is no accident
_SR = "hmpx.attach(optimizer), or --fix recipe.yaml: steps and state in FP32, stochastic rounding; see tune_weights too"


def of_updates(seen: Stepped, names: Mapping[Parameter, str]) -> Iterator[Problem]:
    """The problems of one optimizer. names: of its parameters."""
    if not seen.rounds:
        yield from _lost(seen, names)
        yield from _decay(seen)
        yield from _state(seen)
    yield from _learning_rate(seen)
    yield from _gradients(seen, names)


def _lost(seen: Stepped, names: Mapping[Parameter, str]) -> Iterator[Problem]:
    cls = type(seen.optimizer).__name__
    updates = sum(each.updates for each in seen.tallies.values())
    if updates:
        worst = sorted(seen.tallies, key=lambda p: -seen.tallies[p].lost / max(seen.tallies[p].updates, 1))
        losing = [p for p in worst if seen.tallies[p].lost > THRESHOLD * seen.tallies[p].updates]
        lost = sum(each.lost for each in seen.tallies.values()) / updates
        size = sum(each.size for each in seen.tallies.values()) / updates
        if losing:
            dtype = dtype_name(losing[0].dtype)
            first = seen.tallies[losing[0]]
            yield Problem(
                "lost updates",
                True,
                f"round-to-nearest loses {percent(lost)} of the updates of {dtype} weights by {cls}, and more than "
                f"{100 * THRESHOLD:g} % in {len(losing)} of {len(worst)} parameters, most in {names[losing[0]]} "
                f"({percent(first.lost / first.updates)}); their mean size is {size:.2g} ulp",
                _SR
                if losing[0].dtype is torch.bfloat16
                else "keep the weights in float32, and run the ops in torch.autocast with a GradScaler",
                seen.where,
                tuple(names[p] for p in losing),
                weight=lost,
            )
    elif seen.unknown[0] and seen.unknown[1] > THRESHOLD * seen.unknown[0]:
        share = seen.unknown[1] / seen.unknown[0]
        yield Problem(
            "lost updates",
            False,
            f"{percent(share)} of the weights in low precision that had a gradient did not move in a step of {cls}, "
            "which cannot be taken again in FP32 to tell why",
            "hmpx.attach(optimizer).updates() counts what is lost",
            seen.where,
            weight=share,
        )


def _decay(seen: Stepped) -> Iterator[Problem]:
    asked, arrived = seen.decay
    if asked >= _LEAST_DECAY and arrived < 0.1 * asked:
        group = next(group for group in seen.optimizer.param_groups if group.get("weight_decay"))
        a_step = float(group["lr"]) * float(group["weight_decay"])
        yield Problem(
            "weight decay",
            True,
            f"{percent(max(arrived / asked, 0.0))} of the weight decay arrives in the weights: lr x weight_decay is "
            f"{a_step:.1g} of a weight, and half a unit in its last place is 0.002 or more",
            _SR,
            seen.where,
            weight=0.5,
        )


def _state(seen: Stepped) -> Iterator[Problem]:
    for key, (moved, stayed) in seen.idle.items():
        if moved and stayed > 0.5 * moved:
            dtypes = " and ".join(dtype_name(each) for each in seen.low_state)
            yield Problem(
                "optimizer state",
                True,
                f"{key} in {dtypes} cannot fall: what a step takes off it is less than half a unit in its last place, "
                f"in {percent(stayed / moved)} of the elements",
                _SR,
                seen.where,
                weight=0.45,
            )


def _learning_rate(seen: Stepped) -> Iterator[Problem]:
    for group in seen.optimizer.param_groups:
        lr = group.get("lr")
        if isinstance(lr, torch.Tensor) and lr.dtype in (torch.bfloat16, torch.float16):
            yield Problem(
                "learning rate",
                True,
                f"the learning rate is a tensor in {dtype_name(lr.dtype)}: a scheduler's factor of 0.999 leaves it as "
                "it is",
                "give the optimizer a float, or a tensor in float32",
                seen.where,
                weight=0.4,
            )
            return


def _gradients(seen: Stepped, names: Mapping[Parameter, str]) -> Iterator[Problem]:
    if seen.nonfinite_weights is not None:
        yield Problem(
            "inf or NaN",
            True,
            f"weights are inf or NaN from step {seen.nonfinite_weights} on",
            f"doctor --at {seen.nonfinite_weights} looks at every op of that step and names the first",
            seen.where,
            weight=1.0,
        )
    elif seen.nonfinite is not None:
        yield Problem(
            "inf or NaN",
            True,
            f"gradients are inf or NaN in step {seen.nonfinite}",
            f"doctor --at {seen.nonfinite} looks at every op of that step and names the first",
            seen.where,
            weight=0.9,
        )
    if seen.samples < 2:
        return
    params = parameters(seen.optimizer)
    for found, what in ((seen.no_grad, "no gradient"), (seen.zero_grad, "a gradient of zeros")):
        always = tuple(names[p] for p in params if found[p] == seen.samples)
        if (always and len(always) < len(params)) or (always and what != "no gradient"):
            yield Problem(
                "gradients",
                what != "no gradient" and len(always) == len(params),
                f"{len(always)} of {len(params)} parameters had {what} in each step that was looked at: {some(always)}",
                "leave them out of the optimizer, or look for what cuts them off",
                seen.where,
                always,
                weight=0.05,
            )
