"""What the windows of steps say about a training: one finding for a kind and a line, whoever shares it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hmpx.base.dtype_names import dtype_name
from hmpx.insight.doctor.diagnosis import Names, Problem, percent
from hmpx.insight.doctor.steps import Moves, SteppedOptimizer, total
from hmpx.insight.tensors import LOW
from hmpx.insight.text_table import number
from hmpx.recipes.recipe import Recipe
from hmpx.updates.holding.segment import Way
from hmpx.updates.optimizer_hooks import own_attachment
from hmpx.updates.stepping.names import parameters

Tensor = torch.Tensor
Parameter = torch.nn.Parameter

# Of `kept`, in all steps that were looked at, and in one window of them: below, training falls behind FP32. The README
# of insight has the table.
LIMIT, _OF_WINDOW = 0.9, 0.8
_OF_PARAMETERS = 0.5  # and of a single parameter
_LEAST_DECAY = 5.0  # in ulp: if less than that should arrive, it may fail to by accident
_HARMLESS = 2e-5  # of a weight a step: a decay that takes tens of thousands of steps to be seen
_SR = "hmpx.attach(optimizer) (steps and state in FP32, stochastic rounding{})"
_WIDE = "keep the weights in float32 with products in BF16, as torch.autocast does{}"


def of_steps(optimizers: Sequence[SteppedOptimizer], names: Names) -> Iterator[Problem]:
    """What is wrong with the steps of these optimizers."""
    lines: dict[str, list[SteppedOptimizer]] = {}
    for each in optimizers:
        lines.setdefault(each.where, []).append(each)
    for where, seen in lines.items():
        yield from _of_line(where, seen, names)


def _of_line(where: str, seen: Sequence[SteppedOptimizer], names: Names) -> Iterator[Problem]:
    half = any(p.dtype is torch.float16 for each in seen for p in parameters(each.optimizer))
    recipe: dict[str, Any] = {"parameter_dtype": "float32"} if half else {"weights": "stochastic"}
    do = (_WIDE if half else _SR).format(_bytes(seen, Recipe(**recipe)))
    ways = [way for each in seen for way in _ways(each)]
    loses_no_update = all(map(_ways, seen)) and all(way.weights != "nearest" for way in ways)
    if loses_no_update and any(way.is_coded for way in ways):
        do = "hmpx.attach(optimizer, state_dtype=torch.bfloat16): its state is in too few bits for these gradients"
        recipe["state_dtype"] = "bfloat16"
    lost = _lost(where, seen, names, do, recipe)
    if lost is not None:
        yield lost
    asked, arrived = sum(each.asked for each in seen), sum(each.arrived for each in seen)
    if asked >= _LEAST_DECAY and arrived < 0.1 * asked:
        groups = [group for each in seen for group in each.optimizer.param_groups if group.get("weight_decay")]
        a_step = max(float(group["lr"]) * float(group["weight_decay"]) for group in groups)
        dtype = next(p.dtype for group in groups for p in group["params"] if p.dtype in LOW)
        said = f"weight decay has no effect: it takes {a_step:.0e} of a weight a step, {dtype_name(dtype)} needs "
        said += f"{torch.finfo(dtype).eps / 4:.0e}"
        yield Problem("weight decay", a_step > _HARMLESS, said, do, where, weight=0.3, recipe=recipe)
    for key in dict.fromkeys(key for each in seen for key in each.falls):
        falls, stays = sum(each.falls[key] for each in seen), sum(each.stays[key] for each in seen)
        if stays > 0.5 * falls:
            said = f"{percent(stays / falls)} of {key} in low precision should fall and stays: a step takes less than "
            said += "half of the last digit"
            is_why = lost is not None and lost.wrong
            yield Problem("optimizer state", is_why, said, do, where, weight=0.25, recipe=recipe)
    rates = [group.get("lr") for each in seen for group in each.optimizer.param_groups]
    low = next((lr.dtype for lr in rates if isinstance(lr, Tensor) and lr.dtype in LOW), None)
    if low is not None:
        said = f"the learning rate is a tensor in {dtype_name(low)}: a factor of 0.999 leaves it as it is"
        do = "give the optimizer a float, or a tensor in float32"
        yield Problem("learning rate", True, said, do, where, weight=0.4)
    for what, step in [each.nonfinite for each in seen if each.nonfinite is not None][:1]:
        said = f"{what} are inf or NaN {f'from step {step} on' if what == 'weights' else f'in step {step}'}"
        do = f"doctor --at {step} looks at every op of that step and names the first"
        yield Problem("inf or NaN", True, said, do, where, weight=1.0 if what == "weights" else 0.9)


def _ways(each: SteppedOptimizer) -> list[Way]:
    """Return how an attached optimizer holds weights and state; empty if it is not attached."""
    attachment = own_attachment(each.optimizer)
    return [] if attachment is None else attachment.settings.ways


def _lost(where: str, seen: Sequence[SteppedOptimizer], names: Names, do: str, recipe: Any) -> Problem | None:
    windows: dict[int, list[Moves]] = {}
    params: dict[Parameter, Moves] = {}
    for each in seen:
        for window, rows in each.moves.items():
            windows.setdefault(window, []).extend(rows.values())
            for p, moves in rows.items():
                params[p] = total([params.get(p, Moves()), moves])
    if not params:
        return None
    every = total(params.values())
    worst = sorted(params, key=lambda p: params[p].kept)
    dead = [p for p in worst if params[p].is_below(_OF_PARAMETERS)]
    behind = {window: whole for window, rows in windows.items() if (whole := total(rows)).is_below(_OF_WINDOW)}
    if not (every.is_below(LIMIT) or behind or dead):
        return None
    classes = ", ".join(dict.fromkeys(type(each.optimizer).__name__ for each in seen))
    medians = [each for one in seen for each in one.medians]
    late = not every.is_below(LIMIT) and behind
    kept = min(whole.kept for whole in behind.values()) if late else every.kept
    losing = [p for p in worst if params[p].kept < LIMIT]
    since = f" in the steps from {min(behind, key=lambda each: behind[each].kept)} on" if late else ""
    said = (
        f"{dtype_name(worst[0].dtype)} weights move {percent(min(max(kept, 0), 1))} of the way that {classes} moves "
        f"float32 copies of them{since} ({len(losing)} of {len(params)} parameters, worst {names[worst[0]]}; "
        f"{percent(every.lost / max(every.updates, 1))} of the updates are lost; the median update is "
        f"{statistics.median(medians):.2g} of a weight's last digit)"
    )
    wrong = bool(every.is_below(LIMIT) or behind)
    share = sum(params[p].elements for p in dead) / every.elements
    weight = 0.5 + 0.45 * (1 - min(max(kept, 0), 1)) if wrong else 0.2 * share
    return Problem("lost updates", wrong, said, do, where, tuple(names[p] for p in losing or worst), (), weight, recipe)


def unchecked_of(seen: Sequence[SteppedOptimizer]) -> list[str]:
    """Return in words the updates of weights in low precision that could not be judged, and why."""
    reasons: dict[str, None] = {}
    for each in seen:
        low = [p for p in parameters(each.optimizer) if p.dtype in LOW and p.requires_grad]
        known = total(moves for rows in each.moves.values() for moves in rows.values())
        why = each.unchecked
        if not why and not each.looked:
            why = f"in {number(each.steps, 'step')}, none after the first had gradients"
            attachment = own_attachment(each.optimizer)
            if attachment is not None and attachment.settings.release_gradients:
                why = "each gradient is freed in backward, before its step ends: set release_gradients to false"
        if not why and not known.is_known:
            why = "the float32 copies moved too little to measure it"
        if low and why:
            reasons[f"updates of {dtype_name(low[0].dtype)} weights by {type(each.optimizer).__name__}: {why}"] = None
    return [*reasons]


def _bytes(seen: Sequence[SteppedOptimizer], recipe: Recipe) -> str:
    """Return in words the bytes of weight, gradient and state under a recipe, and those of today."""
    for each in seen:
        for p in (p for p in parameters(each.optimizer) if p.dtype in LOW):
            state = (each.optimizer.state.get(p) or {}).values()
            held = [t for t in state if isinstance(t, Tensor) and t.dim() and t.shape == p.shape]
            today = 2 * p.element_size() + sum(t.element_size() for t in held)
            then = sum(recipe.bytes_per_parameter(len(held)).values())
            return f", {then:g} bytes per parameter instead of {today}" if then != today else ""
    return ""
